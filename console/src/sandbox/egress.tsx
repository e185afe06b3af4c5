// What a sandbox may reach, and what it was refused, as it happens.
import { at, get, type Detail, type NetworkEvent } from "../api";
import { useLive } from "../live";
import { bytes, clock, count, line } from "../text";
import { Badge, Empty, Facts, Loaded, Panel, Table } from "../ui/parts";

const EVERY_MS = 1000;

export function Egress({ id, detail }: { id: string; detail: Detail }) {
  const live = useLive((signal) => get<NetworkEvent[]>(at`/sandboxes/${id}/network/events`, signal), EVERY_MS, [id]);
  const network = detail.network;
  const list = (values: string[] | undefined) => <span class="guest">{values?.length ? values.map((value) => line(value, 80)).join(", ") : "none"}</span>;
  return (
    <>
      <Panel title="Rules">
        <Facts
          of={[
            ["Allowed out", list(network?.allowOut)],
            ["Denied out", list(network?.denyOut)],
            ["Headers added for", list(Object.keys(network?.rules ?? {}))],
            ["Ports from outside", network?.allowPublicTraffic === false ? "need the traffic token" : "open"],
          ]}
        />
      </Panel>
      <Panel title="Refused and ruled traffic" tools={<Badge tone="info">live</Badge>}>
        <Loaded live={live}>
          {(events) =>
            events.length ? (
              <Events events={events} />
            ) : (
              <Empty title="Nothing was refused">Each packet and request that the rules refuse appears here, and each request that they add headers to.</Empty>
            )
          }
        </Loaded>
      </Panel>
    </>
  );
}

function Events({ events }: { events: NetworkEvent[] }) {
  return (
    <div aria-live="polite">
      <span class="sr">{count(events.length, "event")}</span>
      <Table label="Refused and ruled traffic" head={["Time", "Verdict", "Destination", "Protocol", "Request", "#Times"]}>
        {[...events].reverse().map((event, at) => (
          <tr key={`${event.timestamp}${at}`}>
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
          </tr>
        ))}
      </Table>
    </div>
  );
}

function verdict(event: NetworkEvent) {
  if (event.call && !event.call.refused && event.reason === "none") return <Badge tone="good">ruled</Badge>;
  return <Badge tone="bad">refused: {line(event.call?.refused ?? event.reason, 60)}</Badge>;
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
