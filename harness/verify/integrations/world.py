"""The simulated internet of a run: a network namespace with the server and the programs, and one beyond its uplink.

    namespace of the run: lo, up0 203.0.113.2 ── cube-api, sandboxes, the programs
                                  │ veth
    namespace beyond: 203.0.113.1, 192.0.2.1:53 names, 192.0.2.1:443 the models, 192.0.2.2:443 a fast server, with
                      certificates of an authority that only cube-egress of this run trusts

The addresses are from the documentation ranges (RFC 5737). `run.py` enters the first namespace before it imports this.
"""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

HERE = pathlib.Path(__file__).parent
NEAR = "192.0.2.1"
FAST = "192.0.2.2"
HOSTS = {"api.anthropic.com": NEAR, "api.openai.com": NEAR, "origin.test": FAST}
API = "http://127.0.0.1:3000"


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def until(what: str, condition, patience: float = 60) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.05)


def answers(port: int, address: str = "127.0.0.1") -> bool:
    try:
        socket.create_connection((address, port), 1).close()
        return True
    except OSError:
        return False


def certificates(directory: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Creates an authority and its certificate for all hosts. Returns the paths of the authority, and of key and chain."""
    ca, leaf = directory / "ca.pem", directory / "leaf.pem"
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]

    def openssl(*words: object) -> None:
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, cwd=directory)

    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", ca, "-subj", "/CN=authority of the run")
    openssl("req", *key, "-keyout", "leaf.key", "-out", "leaf.csr", "-subj", "/CN=models")
    names = ",".join(f"DNS:{host}" for host in HOSTS)
    (directory / "names").write_text(f"subjectAltName={names}\n")
    openssl("x509", "-req", "-in", "leaf.csr", "-CA", ca, "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
            "-extfile", "names", "-out", "leaf.crt")
    leaf.write_bytes((directory / "leaf.crt").read_bytes() + (directory / "leaf.key").read_bytes())
    return ca, leaf


def names(address: str) -> None:
    """Responds to A queries for the hosts, and to all others that the name does not exist."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind((address, 53))
        while True:
            query, sender = udp.recvfrom(4096)
            labels, at = [], 12
            while query[at]:
                labels.append(query[at + 1 : at + 1 + query[at]].decode("latin1").lower())
                at += query[at] + 1
            question = query[12 : at + 5]
            kind = int.from_bytes(query[at + 1 : at + 3], "big")
            host = HOSTS.get(".".join(labels))
            found = host is not None and kind == 1
            head = query[:2] + (b"\x81\x80" if host else b"\x81\x83") + b"\0\1" + bytes([0, found]) + bytes(4)
            record = b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4" + socket.inet_aton(host) if found else b""
            udp.sendto(head + question + record, sender)


class World:
    """Programs of the run. All end with the `with` block."""

    def __init__(self, directory: pathlib.Path, binaries: pathlib.Path, artifacts: pathlib.Path):
        self.directory, self.binaries, self.artifacts = directory, binaries, artifacts
        self.programs: list[subprocess.Popen] = []
        self.server: subprocess.Popen | None = None

    def __enter__(self):
        ip("link set lo up")
        beyond = subprocess.Popen(["unshare", "--net", sys.executable, __file__, str(self.directory)])
        self.programs.append(beyond)
        until("the namespace beyond", lambda: (self.directory / "beyond").exists())
        ip("link add up0 type veth peer name beyond")
        ip(f"link set beyond netns {beyond.pid}")
        ip("address add 203.0.113.2/24 dev up0")
        ip("link set up0 up")
        ip("route add default via 203.0.113.1")
        until("the models", lambda: answers(443, NEAR))
        self.serve()
        return self

    def serve(self, *options: str) -> None:
        """Starts the server."""
        a = self.artifacts
        words = [
            self.binaries / "cube-api", "serve", "--state", self.directory / "state", "--templates", a / "templates",
            "--images", a / "guest", "--images", a / "stages", "--image-userland", a / "guest",
            "--warm", "0:0", "--uplink", "up0", "--otlp-endpoint", "http://127.0.0.1:4318", "--dns-server", f"{NEAR}:53", "--network-rate", "none", "--build-egress", "deny", "--on-exit", "kill",
            *os.environ.get("CUBE_INTEGRATION_SERVE", "").split(), *options,
        ]  # fmt: skip
        log = open(self.directory / "server.log", "ab")
        environment = {**os.environ, "SSL_CERT_FILE": str(self.directory / "ca.pem")}
        self.server = subprocess.Popen(list(map(str, words)), stderr=log, stdout=log, env=environment)
        until("the server", lambda: answers(3000) or self.server.poll() is not None)
        if self.server.poll() is not None:
            raise RuntimeError((self.directory / "server.log").read_text()[-2000:])

    def stop(self) -> None:
        if self.server and self.server.poll() is None:
            self.server.send_signal(signal.SIGTERM)
            self.server.wait(60)

    def key(self) -> str:
        words = [self.binaries / "cube-api", "key", "new", "integrations", "--state", self.directory / "state"]
        scopes = ["sandboxes:read", "sandboxes:write", "templates:read", "templates:write"]
        scopes += ["secrets:read", "secrets:write", "metrics:read"]
        for scope in scopes:
            words += ["--scope", scope]
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=True)
        key = next(word for word in done.stdout.split() if word.startswith("e2b_"))

        def is_taken() -> bool:
            request = urllib.request.Request(f"{API}/v2/sandboxes", headers={"X-API-Key": key})
            try:
                return urllib.request.urlopen(request).status == 200
            except OSError:
                return False

        until("the key", is_taken)
        return key

    def __exit__(self, *_):
        self.stop()
        for program in self.programs:
            program.terminate()
            program.wait()
        end = [self.binaries / "cube-api", "end", "--state", self.directory / "state"]
        subprocess.run(list(map(str, end)), capture_output=True)


def beyond(directory: pathlib.Path) -> None:
    """The far side, in its own namespace."""
    sys.path.insert(0, str(HERE))
    import model
    import origin

    _, leaf = certificates(directory)
    ip("link set lo up")
    for address in (NEAR, FAST):
        ip(f"address add {address}/32 dev lo")
    threading.Thread(target=names, args=(NEAR,), daemon=True).start()
    model.serve(NEAR, 443, str(leaf))
    threading.Thread(target=origin.serve, args=(FAST, str(leaf)), daemon=True).start()
    (directory / "beyond").touch()
    shown = ["ip", "-o", "link", "show", "beyond"]
    until("the far end of the uplink", lambda: subprocess.run(shown, capture_output=True).returncode == 0)
    ip("address add 203.0.113.1/24 dev beyond")
    ip("link set beyond up")
    threading.Event().wait()


if __name__ == "__main__":
    beyond(pathlib.Path(sys.argv[1]))
