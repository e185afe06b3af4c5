// A registry of one image, `registry.test/small:1`: a root file system with one file (OCI distribution and image specifications).
import { execFileSync } from "node:child_process";
import { createHash } from "node:crypto";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { join } from "node:path";
import { gzipSync } from "node:zlib";

export const IMAGE = "registry.test/small:1";
const OCI = "application/vnd.oci.image";

const digest = (bytes) => `sha256:${createHash("sha256").update(bytes).digest("hex")}`;

export class Registry {
  static async start() {
    const self = new Registry();
    const layer = gzipSync(self.tar());
    const config = Buffer.from(
      JSON.stringify({
        architecture: "amd64",
        os: "linux",
        config: { Env: ["PATH=/usr/local/bin:/usr/bin:/bin", "OF_THE_IMAGE=yes"] },
        rootfs: { type: "layers", diff_ids: [digest(self.tar())] },
      }),
    );
    const part = (kind, bytes) => ({ mediaType: `${OCI}.${kind}`, digest: digest(bytes), size: bytes.length });
    const manifest = Buffer.from(
      JSON.stringify({ schemaVersion: 2, mediaType: `${OCI}.manifest.v1+json`, config: part("config.v1+json", config), layers: [part("layer.v1.tar+gzip", layer)] }),
    );
    const blobs = new Map([config, layer].map((bytes) => [digest(bytes), bytes]));
    self.http = createServer((request, response) => {
      const [, , , kind, name] = request.url.split("/");
      const found = kind === "manifests" ? manifest : blobs.get(name);
      response.statusCode = request.url === "/v2/" || found ? 200 : 404;
      if (found) {
        response.setHeader("Content-Type", kind === "manifests" ? `${OCI}.manifest.v1+json` : "application/octet-stream");
        response.setHeader("Docker-Content-Digest", digest(found));
        response.setHeader("Content-Length", found.length);
      }
      response.end(request.method === "HEAD" ? undefined : found);
    });
    await new Promise((done) => self.http.listen(0, "127.0.0.1", done));
    self.url = `http://127.0.0.1:${self.http.address().port}`;
    return self;
  }

  /** The same bytes at each call. */
  tar() {
    if (!this.bytes) {
      const root = mkdtempSync("/tmp/console-image");
      writeFileSync(join(root, "hello"), "hello from the image\n");
      this.bytes = execFileSync("tar", ["--owner=0", "--group=0", "-C", root, "-c", "hello"]);
      rmSync(root, { recursive: true });
    }
    return this.bytes;
  }

  end() {
    this.http.close();
  }
}
