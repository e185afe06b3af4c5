// What a sandbox may reach, and what it was refused, as it happens.
import { useState } from "preact/hooks";
import { ask, at, get, type Detail, type NetworkEvent } from "../api";
import { named, t } from "../i18n";
import { useLive } from "../live";
import { notify } from "../session";
import { bytes, clock, line } from "../text";
import { words } from "../ui/lists";
import { Badge, Button, Choice, Dialog, Empty, Facts, Field, Loaded, Panel, Table } from "../ui/parts";
import { Still } from "../ui/still";
import { allowing, difference, policyOf, refusedHost, REST, updateOf, whyFixed, type Policy, type Rest } from "./policy";

const EVERY_MS = 1000;

export function Egress({ id, detail, reload }: { id: string; detail: Detail; reload: () => void }) {
  const [draft, setDraft] = useState<Policy>();
  const live = useLive((signal) => get<NetworkEvent[]>(at`/sandboxes/${id}/network/events`, signal), EVERY_MS, [id]);
  const policy = policyOf(detail);
  const fixed = detail.state === "running" ? whyFixed(detail) : t.network.resumeFirst;
  return (
    <>
      <InForce policy={policy} detail={detail} fixed={fixed} change={() => setDraft(policy)} />
      <Panel title={t.network.events} tools={<Badge tone="info">{t.common.live}</Badge>}>
        <Loaded live={live}>
          {(events) =>
            events.length ? (
              <Still data={events.toReversed()} keyOf={keyOf}>
                {(rows) => <Events events={rows} policy={policy} allow={fixed === undefined ? (host) => setDraft(allowing(policy, host)) : undefined} />}
              </Still>
            ) : (
              <Empty title={t.network.none}>{t.network.noneText}</Empty>
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
    [t.network.headersFor, Object.keys(network?.rules ?? {})],
    [t.network.dns, network?.dnsServers ?? []],
    [t.network.proxy, network?.egressProxy ? [t.network.allConnections] : []],
  ];
  return (
    <Panel
      title={t.network.inForce}
      tools={
        <>
          <Badge tone="calm">{policy.isOwn ? t.network.own : t.network.serverDefault}</Badge>
          <Button onClick={change} disabled={fixed !== undefined}>
            {t.network.change}
          </Button>
        </>
      }
    >
      <Facts
        of={[
          [t.network.allowed, list(policy.allowed)],
          [t.network.denied, list(policy.denied)],
          [t.network.rest, t.network.restTexts[policy.rest]],
          ...more.filter(([, values]) => values.length > 0).map(([name, values]): [string, preact.ComponentChildren] => [name, list(values)]),
          [t.network.inbound, network?.allowPublicTraffic === false ? t.network.needToken : t.network.openPorts],
        ]}
      />
      {fixed && <p class="pad muted">{fixed}</p>}
    </Panel>
  );
}

/** Edits the policy, with a preview of what changes. */
function Change({ detail, before, draft, onClose, reload }: { detail: Detail; before: Policy; draft: Policy; onClose: () => void; reload: () => void }) {
  const [rest, setRest] = useState<Rest>(draft.rest);
  const [allowed, setAllowed] = useState(draft.allowed.join("\n"));
  const [denied, setDenied] = useState(draft.denied.join("\n"));
  const after = { rest, allowed: words(allowed), denied: words(denied) };
  const changes = difference(before, after);
  const isSame = changes.every(([mark]) => mark === " ");
  const apply = async () => {
    await ask("PUT", at`/sandboxes/${detail.sandboxID}/network`, updateOf(after, detail));
    notify("good", t.network.changed);
    onClose();
    reload();
  };
  return (
    <Dialog
      title={t.network.policy}
      onClose={onClose}
      action={
        <Button kind="main" onClick={apply} disabled={isSame}>
          {t.network.apply}
        </Button>
      }
    >
      <Field label={t.network.allow} isLong value={allowed} onInput={setAllowed} hint={t.network.allowHint} />
      <Field label={t.network.deny} isLong value={denied} onInput={setDenied} hint={t.network.denyHint} />
      <Choice
        label={t.network.rest}
        value={rest}
        onInput={(value) => setRest(value as Rest)}
        options={REST.map((rest) => [rest, t.network.restOptions[rest]])}
      />
      <div>
        <p class="label">{t.network.newPolicy}</p>
        <pre class="difference" tabIndex={0} aria-label={t.network.newPolicy}>
          {changes.map(([mark, text]) => (
            <span key={mark + text} class={{ "+": "better", "-": "worse", " ": "" }[mark]}>{`${mark} ${line(text, 200)}\n`}</span>
          ))}
        </pre>
        <p class="hint">{t.network.newPolicyHint}</p>
      </div>
    </Dialog>
  );
}

const keyOf = (event: NetworkEvent) => `${event.timestamp} ${event.destination} ${event.name} ${event.protocol}`;

function Events({ events, policy, allow }: { events: NetworkEvent[]; policy: Policy; allow: ((host: string) => void) | undefined }) {
  return (
    <div aria-live="polite">
      <span class="sr">{t.network.count(events.length)}</span>
      <Table label={t.network.events} head={[t.network.time, t.network.verdict, t.network.destination, t.network.protocol, t.network.request, `#${t.network.times}`, ""]}>
        {events.map((event) => {
          const host = refusedHost(event, policy);
          return (
            <tr key={keyOf(event)}>
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
                  <Button onClick={() => allow(host)} label={t.network.allowOf(line(host, 80))}>
                    {t.network.allowHost}
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

function verdict(event: NetworkEvent) {
  if (event.call && !event.call.refused && event.reason === "none") return <Badge tone="good">{t.network.applied}</Badge>;
  const reason = event.call?.refused ?? named(t.network.reasons, event.reason) ?? event.reason;
  return <Badge tone="bad">{t.network.refused(line(reason, 60))}</Badge>;
}

function Call({ call }: { call: NonNullable<NetworkEvent["call"]> }) {
  return (
    <span class="guest">
      {call.method && <code>{`${line(call.method, 12)} ${line(call.path, 200)}`}</code>}
      <span class="muted">
        {call.status ? ` ${call.status} ` : " "}
        {t.network.traffic(bytes(call.bytesOut), bytes(call.bytesIn))}
        {call.rule ? t.network.rule(line(call.rule, 60)) : ""}
        {call.secrets?.length ? t.network.secrets(call.secrets.map((name) => line(name, 40)).join(", ")) : ""}
      </span>
    </span>
  );
}
