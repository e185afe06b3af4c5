// One sandbox: what it is, what it does, and what can be done with it.
import { useState } from "preact/hooks";
import { ApiError, ask, at, post, remove, type Detail } from "../api";
import { Cells } from "../cells/cells";
import { useLive } from "../live";
import { arrival, link, notify, route } from "../session";
import { count, line, span, when } from "../text";
import { Copy } from "../ui/copy";
import { timeoutIn } from "../ui/minutes";
import { Badge, Button, Dialog, Empty, Facts, Field, Loaded, Panel, StateBadge, Tabs } from "../ui/parts";
import { Connect } from "./connect";
import { Egress } from "./egress";
import { Files } from "./files";
import { Logs } from "./logs";
import { Metrics } from "./metrics";
import { policyOf, summary } from "./policy";
import { leaveShells, shellsOf } from "./shells";
import { origin, phases, startOf } from "./start";
import { LastScreens, TerminalView } from "./terminal";

const TABS: [string, string][] = [
  ["", "Details"],
  ["terminal", "Terminal"],
  ["files", "Files"],
  ["logs", "Logs"],
  ["network", "Network"],
  ["cells", "Cells"],
];

interface Loaded_ {
  detail: Detail;
  headers: Headers;
}

export function SandboxPage({ id }: { id: string }) {
  const live = useLive(
    async (signal): Promise<Loaded_> => {
      const { body, headers } = await ask<Detail>("GET", at`/sandboxes/${id}`, undefined, signal);
      return { detail: body, headers };
    },
    3000,
    [id],
  );
  const tab = route.value[2] ?? "";
  const isGone = live.error instanceof ApiError && live.error.status === 404;
  if (isGone) {
    return (
      <>
        <div class="head">
          <h1 class="mono">{line(id, 60)}</h1>
          <Badge tone="calm">ended</Badge>
        </div>
        <Panel title="This sandbox does not exist">
          <Empty title="It has ended, or never was">
            <a href={link("sandboxes")}>All sandboxes</a>
          </Empty>
        </Panel>
        {shellsOf(id).open.value.length > 0 && <LastScreens id={id} />}
      </>
    );
  }
  return (
    <>
      <div class="head named">
        <h1 class="mono">{line(id, 60)}</h1>
        <Copy text={id} what="the id" />
        {live.data && <StateBadge state={live.data.detail.state} />}
        {live.data && <TimeLeft detail={live.data.detail} />}
        {live.data && <Actions detail={live.data.detail} reload={live.reload} />}
      </div>
      <Tabs label="Parts of the sandbox" current={tab} tabs={TABS.map(([path, name]) => ({ id: path, name, href: path ? link("sandboxes", id, path) : link("sandboxes", id) }))} />
      <Loaded live={live}>{({ detail, headers }) => <Views detail={detail} headers={headers} tab={tab} reload={live.reload} />}</Loaded>
    </>
  );
}

/** Time in which somebody who works in the sandbox can still extend it. */
const SOON_MS = 120_000;

function TimeLeft({ detail }: { detail: Detail }) {
  if (detail.state !== "running") return null;
  const left = new Date(detail.endAt).getTime() - Date.now();
  const verb = detail.lifecycle?.onTimeout === "pause" ? "pauses" : "ends";
  return left < SOON_MS ? <Badge tone="warn">{`${verb} in ${span(detail.endAt)}`}</Badge> : <span class="muted">{`${verb} in ${span(detail.endAt)}`}</span>;
}

function Views({ detail, headers, tab, reload }: { detail: Detail; headers: Headers; tab: string; reload: () => void }) {
  const id = detail.sandboxID;
  const isRunning = detail.state === "running";
  if (!isRunning && ["terminal", "files", "cells"].includes(tab)) return <Asleep id={id} reload={reload} />;
  switch (tab) {
    case "":
      return <Details detail={detail} headers={headers} />;
    case "terminal":
      return <TerminalView id={id} />;
    case "files":
      return <Files id={id} />;
    case "logs":
      return <Logs id={id} />;
    case "network":
      return <Egress id={id} detail={detail} reload={reload} />;
    case "cells":
      return <Cells id={id} />;
    default:
      return <Empty title="No such page" />;
  }
}

function Asleep({ id, reload }: { id: string; reload: () => void }) {
  return (
    <Panel title="Paused">
      <Empty title="The sandbox is paused">
        It continues where it stopped, with all of its processes.
        <div>
          <Button kind="main" onClick={() => resume(id).then(reload)}>
            Resume
          </Button>
        </div>
      </Empty>
    </Panel>
  );
}

async function resume(id: string) {
  await post(at`/sandboxes/${id}/resume`, {});
  notify("good", "The sandbox continues.");
}

function Actions({ detail, reload }: { detail: Detail; reload: () => void }) {
  const id = detail.sandboxID;
  const [dialog, setDialog] = useState<"" | "kill" | "snapshot" | "timeout">("");
  const close = () => setDialog("");
  const isRunning = detail.state === "running";
  const pause = async () => {
    await post(at`/sandboxes/${id}/pause`, {});
    notify("good", "The sandbox is paused.");
    reload();
  };
  const fork = async () => {
    const arrive = arrival();
    const made = await post<{ sandbox?: { sandboxID: string }; error?: { message: string } }[]>(at`/sandboxes/${id}/fork`, { count: 1, timeout: 900 });
    const first = made[0];
    if (!first?.sandbox) throw new Error(first?.error?.message ?? "The fork failed.");
    arrive(`Forked: ${first.sandbox.sandboxID}.`, "sandboxes", first.sandbox.sandboxID);
  };
  return (
    <div class="tools">
      {isRunning ? <Button onClick={pause}>Pause</Button> : <Button onClick={() => resume(id).then(reload)}>Resume</Button>}
      {isRunning && <Button onClick={fork}>Fork</Button>}
      {isRunning && <Button onClick={() => setDialog("snapshot")}>Snapshot</Button>}
      {isRunning && <Button onClick={() => setDialog("timeout")}>Timeout</Button>}
      <Button kind="danger" onClick={() => setDialog("kill")}>
        Kill
      </Button>
      {dialog === "kill" && <Kill id={id} onClose={close} />}
      {dialog === "snapshot" && <TakeSnapshot id={id} onClose={close} />}
      {dialog === "timeout" && <SetTimeout id={id} onClose={close} reload={reload} />}
    </div>
  );
}

function Kill({ id, onClose }: { id: string; onClose: () => void }) {
  const kill = async () => {
    const arrive = arrival();
    await remove(at`/sandboxes/${id}`);
    leaveShells(id);
    onClose();
    arrive(`Killed ${id}.`, "sandboxes");
  };
  return (
    <Dialog
      title="Kill the sandbox?"
      onClose={onClose}
      action={
        <Button kind="danger" onClick={kill}>
          Kill {id.slice(0, 8)}…
        </Button>
      }
    >
      <p>Its processes and its disk are lost. Snapshots of it stay.</p>
    </Dialog>
  );
}

function TakeSnapshot({ id, onClose }: { id: string; onClose: () => void }) {
  const [name, setName] = useState("");
  const take = async () => {
    const made = await post<{ snapshotID: string }>(at`/sandboxes/${id}/snapshots`, name.trim() ? { name: name.trim() } : {});
    notify("good", `Snapshot ${name.trim() || made.snapshotID} is ready.`);
    onClose();
  };
  return (
    <Dialog
      title="Take a snapshot"
      onClose={onClose}
      action={
        <Button kind="main" onClick={take}>
          Take
        </Button>
      }
    >
      <p class="muted">Sandboxes can be created from it, each with a copy of this one's memory and disk.</p>
      <Field label="Name (optional)" value={name} onInput={setName} placeholder="name or name:tag" />
    </Dialog>
  );
}

function SetTimeout({ id, onClose, reload }: { id: string; onClose: () => void; reload: () => void }) {
  const [minutes, setMinutes] = useState("60");
  const set = async () => {
    await timeoutIn(minutes, (timeout) => post(at`/sandboxes/${id}/timeout`, { timeout }));
    onClose();
    reload();
  };
  return (
    <Dialog
      title="Set the timeout"
      onClose={onClose}
      action={
        <Button kind="main" onClick={set}>
          Set
        </Button>
      }
    >
      <Field label="Minutes from now" type="number" min="1" value={minutes} onInput={setMinutes} />
    </Dialog>
  );
}

function Details({ detail, headers }: { detail: Detail; headers: Headers }) {
  const metadata = Object.entries(detail.metadata ?? {});
  return (
    <>
      <div class="grid">
        <Panel title="Details">
          <Facts
            of={[
              ["Template", <span class="guest">{line(detail.alias ?? detail.templateID, 80)}</span>],
              ["Started", when(detail.startedAt)],
              ["Ends", detail.state === "running" ? `in ${span(detail.endAt)}` : "–"],
              ["On timeout", detail.lifecycle?.onTimeout === "pause" ? "paused" : "ended"],
              ["Resumed by traffic", detail.lifecycle?.autoResume ? "yes" : "no"],
              ["Size", `${detail.cpuCount} vCPU, ${detail.memoryMB} MiB, disk ${detail.diskSizeMB} MiB`],
              ["Network", <a href={link("sandboxes", detail.sandboxID, "network")}>{summary(policyOf(detail))}</a>],
              ["Metadata", metadata.length ? <span class="guest">{metadata.map(([name, value]) => `${line(name, 60)}=${line(value, 120)}`).join(", ")}</span> : "none"],
            ]}
          />
        </Panel>
        <Timeline headers={headers} id={detail.sandboxID} />
      </div>
      <Connect id={detail.sandboxID} />
      <Metrics id={detail.sandboxID} />
    </>
  );
}

const NAMES: Record<string, string> = {
  process_started: "VMM started",
  jailed: "VMM confined",
  memory_mapped: "Memory mapped",
  devices_ready: "Devices ready",
  confined: "Network confined",
  resumed: "vCPU resumed",
  agent_ready: "Agent ready",
  total: "Answered",
};

function Timeline({ headers, id }: { headers: Headers; id: string }) {
  const own = phases(headers);
  const steps = own.length ? own : phases(startOf.get(id));
  const start = origin(headers) || origin(startOf.get(id));
  const most = Math.max(...steps.map((step) => step.ms), 0.001);
  return (
    <Panel title="Last start" tools={start && <Badge tone={start === "warm" ? "good" : "calm"}>{line(start, 20)}</Badge>}>
      {steps.length === 0 ? (
        <Empty title="No times recorded">The server keeps the times of a start or resume until it restarts.</Empty>
      ) : (
        <ol class="steps" aria-label={`${count(steps.length, "phase")}, milliseconds from the accepted request`}>
          {steps.map((step) => (
            <li key={step.name}>
              <span>{NAMES[step.name] ?? line(step.name, 40)}</span>
              <span class="track">
                <span style={{ width: `${((step.ms / most) * 100).toFixed(1)}%` }} />
              </span>
              <span class="num">{step.ms.toFixed(step.ms < 10 ? 2 : 1)} ms</span>
            </li>
          ))}
        </ol>
      )}
    </Panel>
  );
}
