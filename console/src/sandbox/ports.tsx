// The ports on which programs of a sandbox listen, with links.
import { useState } from "preact/hooks";
import type { Detail } from "../api";
import { AGENT, guestOf, INTERPRETER, run } from "../envd";
import { t } from "../i18n";
import { useLive } from "../live";
import { Badge, Button, Empty, Loaded, Panel } from "../ui/parts";

/** Of lines of /proc/net/tcp and tcp6: `  0: 00000000:1F90 00000000:0000 0A …`. State 0A is LISTEN. */
const LISTENS = /^\s*\d+:\s+[0-9A-F]+:([0-9A-F]{4})\s+[0-9A-F]+:0000\s+0A\s/gm;
/** Of a server without a domain. */
const NO_DOMAIN = /\.invalid$/;

async function listening(id: string): Promise<number[]> {
  const table = await run(await guestOf(id), ["cat", "/proc/net/tcp", "/proc/net/tcp6"], "user");
  const ports = [...table.matchAll(LISTENS)].map(([, port = ""]) => Number.parseInt(port, 16));
  return [...new Set(ports)].filter((port) => port !== AGENT).sort((a, b) => a - b);
}

/** A host name of its own, if the server has a domain; otherwise a path of this origin. */
function addressOf({ sandboxID, domain }: Detail, port: number): string {
  return domain && !NO_DOMAIN.test(domain) ? `${location.protocol}//${port}-${sandboxID}.${domain}/` : `/sandbox/${sandboxID}/${port}/`;
}

export function Ports({ detail }: { detail: Detail }) {
  // A request to such a sandbox moves its deadline: looking at its details must not.
  const [isAsked, setIsAsked] = useState(!detail.lifecycle?.onActivity);
  const live = useLive(async () => (isAsked ? listening(detail.sandboxID) : null), 0, [detail.sandboxID, isAsked]);
  const look = () => (isAsked ? live.reload() : setIsAsked(true));
  const needsToken = detail.network?.allowPublicTraffic === false;
  return (
    <Panel title={t.ports.title} tools={<Button onClick={look}>{isAsked ? t.common.reload : t.ports.look}</Button>}>
      <Loaded live={live}>
        {(ports) =>
          !ports?.length ? (
            <Empty title={ports ? t.ports.none : t.ports.notAsked} />
          ) : (
            <div class="pad tools">
              {ports.map((port) =>
                needsToken ? (
                  <Badge key={port} tone="calm">
                    {port}
                  </Badge>
                ) : (
                  <a key={port} class="button" href={addressOf(detail, port)} target="_blank" rel="noopener noreferrer" aria-label={port === INTERPRETER ? `${t.ports.open(port)} ${t.ports.interpreter}` : t.ports.open(port)}>
                    {port}{" "}
                    {port === INTERPRETER && <span class="muted">{t.ports.interpreter}</span>}
                  </a>
                ),
              )}
            </div>
          )
        }
      </Loaded>
      {needsToken && <p class="pad muted">{t.ports.needToken}</p>}
    </Panel>
  );
}
