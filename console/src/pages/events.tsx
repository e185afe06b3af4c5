// What happened to sandboxes in the last days, also to those that have ended.
import { useState } from "preact/hooks";
import { at, get, type LifecycleEvent } from "../api";
import { named, t } from "../i18n";
import { useLive } from "../live";
import { link } from "../session";
import { line, millis, span, when } from "../text";
import { pairsText } from "../ui/lists";
import { Badge, Button, Choice, Empty, Field, Loaded, Panel, Table, type Tone } from "../ui/parts";
import { Still } from "../ui/still";

/** All types of events, without what their names have in common. */
export const KINDS = ["created", "updated", "paused", "resumed", "checkpointed", "moved", "killed", "refused"] as const;
type Kind = (typeof KINDS)[number];
const TONES: Record<string, Tone> = { created: "good", resumed: "good", paused: "warn", killed: "bad", refused: "bad" };
const SHOWN = 50;
const SANDBOX = /^i[a-z0-9]{19}$/;

export function typeOf(kind: Kind): string {
  return kind === "refused" ? "sandbox.network.refused" : `sandbox.lifecycle.${kind}`;
}

export function KindBadge({ type }: { type: string }) {
  const kind = type.split(".").at(-1) ?? "";
  return <Badge tone={TONES[kind] ?? "info"}>{named(t.events.kinds, kind) ?? line(type, 60)}</Badge>;
}

export function Events() {
  const [kind, setKind] = useState("");
  const [sandbox, setSandbox] = useState("");
  const [page, setPage] = useState(0);
  const id = sandbox.trim();
  const path = SANDBOX.test(id) ? at`/events/sandboxes/${id}` : "/events/sandboxes";
  const query = `?limit=${SHOWN}&offset=${page * SHOWN}${kind && `&types=${typeOf(kind as Kind)}`}`;
  const live = useLive((signal) => get<LifecycleEvent[]>(path + query, signal), 3000, [path, query]);
  const first = (change: (value: string) => void) => (value: string) => {
    setPage(0);
    change(value);
  };
  return (
    <>
      <div class="head">
        <h1>{t.app.events}</h1>
      </div>
      <Panel title={t.events.title} tools={<span class="muted">{t.events.kept}</span>}>
        <div class="filters">
          <Field label={t.events.sandbox} type="search" value={sandbox} onInput={first(setSandbox)} />
          <Choice label={t.events.type} value={kind} onInput={first(setKind)} options={[["", t.events.all], ...KINDS.map((one) => [one, t.events.kinds[one]] as const)]} />
          <Button onClick={() => setPage(page - 1)} disabled={page === 0}>
            {t.events.newer}
          </Button>
          <Button onClick={() => setPage(page + 1)} disabled={(live.data?.length ?? 0) < SHOWN}>
            {t.events.older}
          </Button>
        </div>
        {id && !SANDBOX.test(id) && <p class="pad muted">{t.events.wholeId}</p>}
        <Loaded live={live}>{(events) => (events.length ? <EventTable events={events} /> : <Empty title={t.events.none}>{kind === "refused" && t.events.noneRefused}</Empty>)}</Loaded>
      </Panel>
    </>
  );
}

/** The first cells of a row about an event. */
export function EventCells({ at, type, sandbox }: { at: string; type: string; sandbox: string }) {
  return (
    <>
      <td class="nowrap">{when(at)}</td>
      <td>
        <KindBadge type={type} />
      </td>
      <td>
        <a class="id" href={link("sandboxes", sandbox)}>
          {line(sandbox, 40)}
        </a>
      </td>
    </>
  );
}

export function EventTable({ events }: { events: LifecycleEvent[] }) {
  return (
    <Still data={events} keyOf={(event) => event.id}>
      {(shown) => (
        <Table label={t.app.events} head={[t.network.time, t.events.type, t.events.sandbox, t.sandbox.template, t.events.details, t.sandbox.metadata]}>
          {shown.map((event) => (
            <tr key={event.id}>
              <EventCells at={event.timestamp} type={event.type} sandbox={event.sandboxId} />
              <td>
                <span class="guest id">{line(event.sandboxTemplateId ?? "–", 60)}</span>
              </td>
              <td>
                <span class="guest">{detailsOf(event)}</span>
              </td>
              <td>
                <span class="guest muted">{line(pairsText(event.eventData.sandbox_metadata), 200)}</span>
              </td>
            </tr>
          ))}
        </Table>
      )}
    </Still>
  );
}

export function detailsOf({ eventData: { reason, execution, set_timeout, network } }: LifecycleEvent): string {
  const parts = [
    reason && line(reason, 200),
    execution?.execution_time !== undefined && t.events.ran(execution.execution_time < 1000 ? millis(execution.execution_time / 1000) : span(new Date(execution.execution_time).toISOString(), 0)),
    set_timeout && t.events.until(when(set_timeout)),
    network && t.events.refused(line(network.name || network.destination, 120), network.count ?? 1),
  ];
  return parts.filter(Boolean).join(t.common.comma) || "–";
}
