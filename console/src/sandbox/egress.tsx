// What a sandbox may reach, and what it was refused, as it happens.
import { useState } from "preact/hooks";
import { ask, at, get, type Detail, type NetworkEvent } from "../api";
import { useLive } from "../live";
import { notify } from "../session";
import { bytes, clock, count, line } from "../text";
import { Badge, Button, Choice, Dialog, Empty, Facts, Field, Loaded, Panel, Table } from "../ui/parts";
import { allowing, difference, policyOf, refusedHost, restText, updateOf, whyFixed, type Policy, type Rest } from "./policy";

const EVERY_MS = 1000;

export function Egress({ id, detail, reload }: { id: string; detail: Detail; reload: () => void }) {
  const [draft, setDraft] = useState<Policy>();
  const live = useLive((signal) => get<NetworkEvent[]>(at`/sandboxes/${id}/network/events`, signal), EVERY_MS, [id]);
  const policy = policyOf(detail);
  const fixed = detail.state === "running" ? whyFixed(detail) : "Resume the sandbox to change its policy.";
  return (
    <>
      <InForce policy={policy} detail={detail} fixed={fixed} change={() => setDraft(policy)} />
      <Panel title="Refused traffic and requests under rules" tools={<Badge tone="info">live</Badge>}>
        <Loaded live={live}>
          {(events) =>
            events.length ? (
              <Events events={events} policy={policy} allow={fixed === undefined ? (host) => setDraft(allowing(policy, host)) : undefined} />
            ) : (
              <Empty title="Nothing was refused">Refused packets and requests appear here, and requests that a header rule applies to.</Empty>
            )
          }
        </Loaded>
      </Panel>
      {draft && <Change detail={detail} before={policy} draft={draft} onClose={() => setDraft(undefined)} reload={reload} />}
    </>
  );
}

function InForce({ policy, detail, fixed, change }: { policy: Policy; detail: Detail; fixed: string | undefined; change: () => void }) {
  const { network } = detail;
  const list = (values: string[]) => <span class="guest">{values.length ? values.map((value) => line(value, 80)).join(", ") : "–"}</span>;
  const more: [string, string[]][] = [
    ["Headers added for", Object.keys(network?.rules ?? {})],
    ["DNS servers", network?.dnsServers ?? []],
    ["Proxy", network?.egressProxy ? ["all connections"] : []],
  ];
  return (
    <Panel
      title="Policy in force"
      tools={
        <>
          <Badge tone="calm">{policy.isOwn ? "set for this sandbox" : "server's default"}</Badge>
          <Button onClick={change} disabled={fixed !== undefined}>
            Change
          </Button>
        </>
      }
    >
      <Facts
        of={[
          ["Allowed", list(policy.allowed)],
          ["Denied", list(policy.denied)],
          ["Everything else", restText(policy.rest)],
          ...more.filter(([, values]) => values.length > 0).map(([name, values]): [string, preact.ComponentChildren] => [name, list(values)]),
          ["Inbound ports", network?.allowPublicTraffic === false ? "need the traffic token" : "open to clients of this server"],
        ]}
      />
      {fixed && <p class="pad muted">{fixed}</p>}
    </Panel>
  );
}

const entries = (text: string) => [...new Set(text.split(/[\s,]+/).filter(Boolean))];

/** Edits the policy, with a preview of what changes. */
function Change({ detail, before, draft, onClose, reload }: { detail: Detail; before: Policy; draft: Policy; onClose: () => void; reload: () => void }) {
  const [rest, setRest] = useState<Rest>(draft.rest);
  const [allowed, setAllowed] = useState(draft.allowed.join("\n"));
  const [denied, setDenied] = useState(draft.denied.join("\n"));
  const after = { rest, allowed: entries(allowed), denied: entries(denied) };
  const changes = difference(before, after);
  const isSame = changes.every(([mark]) => mark === " ");
  const apply = async () => {
    await ask("PUT", at`/sandboxes/${detail.sandboxID}/network`, updateOf(after, detail));
    notify("good", "The new network policy is in force.");
    onClose();
    reload();
  };
  return (
    <Dialog
      title="Network policy"
      onClose={onClose}
      action={
        <Button kind="main" onClick={apply} disabled={isSame}>
          Apply
        </Button>
      }
    >
      <Field label="Allow" isLong value={allowed} onInput={setAllowed} hint="Host names, addresses or CIDR blocks, one per line. Takes precedence over Deny. Names need “everything else” to be refused." />
      <Field label="Deny" isLong value={denied} onInput={setDenied} hint="Addresses or CIDR blocks, one per line." />
      <Choice
        label="Everything else"
        value={rest}
        onInput={(value) => setRest(value as Rest)}
        options={[
          ["default", "Server's default"],
          ["nothing", "Refuse"],
          ["internet", "Allow the internet, not private ranges"],
        ]}
      />
      <div>
        <p class="label">New policy</p>
        <pre class="difference" tabIndex={0} aria-label="New policy">
          {changes.map(([mark, text]) => (
            <span key={mark + text} class={{ "+": "better", "-": "worse", " ": "" }[mark]}>{`${mark} ${line(text, 200)}\n`}</span>
          ))}
        </pre>
        <p class="hint">Applies at once, also to open connections. Header rules, DNS servers and the proxy stay as they are.</p>
      </div>
    </Dialog>
  );
}

function Events({ events, policy, allow }: { events: NetworkEvent[]; policy: Policy; allow: ((host: string) => void) | undefined }) {
  return (
    <div aria-live="polite">
      <span class="sr">{count(events.length, "event")}</span>
      <Table label="Refused traffic and requests under rules" head={["Time", "Verdict", "Destination", "Protocol", "Request", "#Times", ""]}>
        {[...events].reverse().map((event) => {
          const host = refusedHost(event, policy);
          return (
            <tr key={`${event.timestamp} ${event.destination} ${event.name} ${event.protocol}`}>
              <td class="nowrap">{clock(event.timestamp)}</td>
              <td>{verdict(event)}</td>
              <td>
                <span class="guest mono">
                  {line(event.destination, 120)}
                  {event.name && ` ${line(event.name, 120)}`}
                </span>
              </td>
              <td>{line(event.protocol, 12)}</td>
              <td>{event.call ? <Call call={event.call} /> : <span class="muted">–</span>}</td>
              <td class="num">{event.count}</td>
              <td>
                {allow && host && !policy.allowed.includes(host) && (
                  <Button onClick={() => allow(host)} label={`Allow ${line(host, 80)}`}>
                    Allow this host
                  </Button>
                )}
              </td>
            </tr>
          );
        })}
      </Table>
    </div>
  );
}

/** Reasons of refusals, in words. Those of `netisolation::Reason` that are not listed explain themselves. */
const REASONS: Record<string, string> = {
  policy: "not allowed",
  name: "name not allowed",
  forbidden: "reserved range",
  host: "address of the host",
  dns: "other DNS server",
  not_ip: "not IP",
  rebinding: "name leads to a reserved address",
  unsolicited: "no open connection",
  flows: "too many connections",
  no_route: "no route",
};

function verdict(event: NetworkEvent) {
  if (event.call && !event.call.refused && event.reason === "none") return <Badge tone="good">rule applied</Badge>;
  const reason = event.call?.refused ?? REASONS[event.reason] ?? event.reason;
  return <Badge tone="bad">refused: {line(reason, 60)}</Badge>;
}

function Call({ call }: { call: NonNullable<NetworkEvent["call"]> }) {
  return (
    <span class="guest">
      {call.method && <code>{`${line(call.method, 12)} ${line(call.path, 200)}`}</code>}
      <span class="muted">
        {call.status ? ` ${call.status}` : ""} {bytes(call.bytesOut)} out, {bytes(call.bytesIn)} in
        {call.rule ? `, rule ${line(call.rule, 60)}` : ""}
        {call.secrets?.length ? `, secret ${call.secrets.map((name) => line(name, 40)).join(", ")}` : ""}
      </span>
    </span>
  );
}
