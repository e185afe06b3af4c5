// One sandbox: what it is, what it does, and what can be done with it.
import { useState } from "preact/hooks";
import { ApiError, ask, at, get, post, remove, type Detail, type LifecycleEvent } from "../api";
import { Cells } from "../cells/cells";
import { named, t } from "../i18n";
import { useLive } from "../live";
import { EventTable } from "../pages/events";
import { arrival, link, notify, route } from "../session";
import { line, mebibytes, millis, span, when } from "../text";
import { Copy } from "../ui/copy";
import { timeoutIn } from "../ui/minutes";
import { Badge, Button, Confirm, Dialog, Empty, Facts, Field, Loaded, Panel, StateBadge, Tabs } from "../ui/parts";
import { Connect } from "./connect";
import { Egress } from "./egress";
import { Files } from "./files";
import { Logs } from "./logs";
import { Metrics } from "./metrics";
import { policyOf, summary } from "./policy";
import { Ports } from "./ports";
import { leaveShells, shellsOf } from "./shells";
import { origin, phases, startOf } from "./start";
import { LastScreens, TerminalView } from "./terminal";

const TABS = ["details", "terminal", "files", "logs", "network", "cells"] as const;

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
          <Badge tone="calm">{t.sandbox.ended}</Badge>
        </div>
        <Ended id={id} />
        {shellsOf(id).open.value.length > 0 && <LastScreens id={id} />}
      </>
    );
  }
  return (
    <>
      <div class="head named">
        <h1 class="mono">{line(id, 60)}</h1>
        <Copy text={id} what={t.sandbox.theId} />
        {live.data && <StateBadge state={live.data.detail.state} />}
        {live.data && <TimeLeft detail={live.data.detail} />}
        {live.data && <Actions detail={live.data.detail} reload={live.reload} />}
      </div>
      <Tabs label={t.sandbox.parts} current={tab} tabs={TABS.map((name) => (name === "details" ? { id: "", name: t.sandbox.tabs[name], href: link("sandboxes", id) } : { id: name, name: t.sandbox.tabs[name], href: link("sandboxes", id, name) }))} />
      <Loaded live={live}>{({ detail, headers }) => <Views detail={detail} headers={headers} tab={tab} reload={live.reload} />}</Loaded>
    </>
  );
}

/** What the events of the last days say of a sandbox that is gone. */
function Ended({ id }: { id: string }) {
  const live = useLive((signal) => get<LifecycleEvent[]>(at`/events/sandboxes/${id}` + "?limit=100", signal).catch(() => []), 3000, [id]);
  if (live.data?.length === 0) {
    return (
      <Panel title={t.sandbox.notHere}>
        <Empty title={t.sandbox.notHereText}>
          <a href={link("sandboxes")}>{t.sandbox.all}</a>
        </Empty>
      </Panel>
    );
  }
  return (
    <Panel title={t.sandbox.whatRemains} tools={<a href={link("sandboxes")}>{t.sandbox.all}</a>}>
      <Loaded live={live}>{(events) => <EventTable events={events} />}</Loaded>
    </Panel>
  );
}

/** Time in which somebody who works in the sandbox can still extend it. */
const SOON_MS = 120_000;

function TimeLeft({ detail }: { detail: Detail }) {
  if (detail.state !== "running") return null;
  const left = new Date(detail.endAt).getTime() - Date.now();
  const text = (detail.lifecycle?.onTimeout === "pause" ? t.sandbox.pausesIn : t.sandbox.endsIn)(span(detail.endAt));
  return left < SOON_MS ? <Badge tone="warn">{text}</Badge> : <span class="muted">{text}</span>;
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
      return <Empty title={t.common.noSuchPage} />;
  }
}

function Asleep({ id, reload }: { id: string; reload: () => void }) {
  return (
    <Panel title={t.sandbox.paused}>
      <Empty title={t.sandbox.isPaused}>
        {t.sandbox.isPausedText}
        <div>
          <Button kind="main" onClick={() => resume(id).then(reload)}>
            {t.sandbox.resume}
          </Button>
        </div>
      </Empty>
    </Panel>
  );
}

async function resume(id: string) {
  await post(at`/sandboxes/${id}/resume`, {});
  notify("good", t.sandbox.resumed);
}

function Actions({ detail, reload }: { detail: Detail; reload: () => void }) {
  const id = detail.sandboxID;
  const [dialog, setDialog] = useState<"" | "kill" | "snapshot" | "timeout">("");
  const close = () => setDialog("");
  const isRunning = detail.state === "running";
  const pause = async () => {
    await post(at`/sandboxes/${id}/pause`, {});
    notify("good", t.sandbox.wasPaused);
    reload();
  };
  const fork = async () => {
    const arrive = arrival();
    const made = await post<{ sandbox?: { sandboxID: string }; error?: { message: string } }[]>(at`/sandboxes/${id}/fork`, { count: 1, timeout: 900 });
    const first = made[0];
    if (!first?.sandbox) throw new Error(first?.error?.message ?? t.sandbox.forkFailed);
    arrive(t.sandbox.forked(first.sandbox.sandboxID), "sandboxes", first.sandbox.sandboxID);
  };
  return (
    <div class="tools">
      {isRunning ? <Button onClick={pause}>{t.sandbox.pause}</Button> : <Button onClick={() => resume(id).then(reload)}>{t.sandbox.resume}</Button>}
      {isRunning && <Button onClick={fork}>{t.sandbox.fork}</Button>}
      {isRunning && <Button onClick={() => setDialog("snapshot")}>{t.sandbox.snapshot}</Button>}
      {isRunning && <Button onClick={() => setDialog("timeout")}>{t.sandbox.timeout}</Button>}
      <Button kind="danger" onClick={() => setDialog("kill")}>
        {t.sandbox.kill}
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
    arrive(t.sandbox.killed(id), "sandboxes");
  };
  return <Confirm title={t.sandbox.killAsk} name={id} text={t.sandbox.killText} verb={t.sandbox.killOne(id.slice(0, 8))} onClose={onClose} confirm={kill} />;
}

function TakeSnapshot({ id, onClose }: { id: string; onClose: () => void }) {
  const [name, setName] = useState("");
  const take = async () => {
    const made = await post<{ snapshotID: string }>(at`/sandboxes/${id}/snapshots`, name.trim() ? { name: name.trim() } : {});
    notify("good", t.sandbox.snapshotReady(name.trim() || made.snapshotID));
    onClose();
  };
  return (
    <Dialog
      title={t.sandbox.takeSnapshot}
      onClose={onClose}
      action={
        <Button kind="main" onClick={take}>
          {t.sandbox.take}
        </Button>
      }
    >
      <p class="muted">{t.sandbox.takeText}</p>
      <Field label={t.sandbox.optionalName} value={name} onInput={setName} placeholder={t.sandbox.nameForm} />
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
      title={t.sandbox.setTimeout}
      onClose={onClose}
      action={
        <Button kind="main" onClick={set}>
          {t.sandbox.set}
        </Button>
      }
    >
      <Field label={t.sandbox.minutes} type="number" min="1" value={minutes} onInput={setMinutes} />
    </Dialog>
  );
}

function Details({ detail, headers }: { detail: Detail; headers: Headers }) {
  const metadata = Object.entries(detail.metadata ?? {});
  return (
    <>
      <div class="grid">
        <Panel title={t.sandbox.details}>
          <Facts
            of={[
              [t.sandbox.template, <span class="guest">{line(detail.alias ?? detail.templateID, 80)}</span>],
              [t.sandbox.started, when(detail.startedAt)],
              [t.sandbox.ends, detail.state === "running" ? t.sandbox.inTime(span(detail.endAt)) : "–"],
              [t.sandbox.onTimeout, detail.lifecycle?.onTimeout === "pause" ? t.sandbox.willPause : t.sandbox.willEnd],
              [t.sandbox.byTraffic, detail.lifecycle?.autoResume ? t.common.yes : t.common.no],
              [t.common.size, t.common.machine(detail.cpuCount, mebibytes(detail.memoryMB), mebibytes(detail.diskSizeMB))],
              [t.sandbox.network, <a href={link("sandboxes", detail.sandboxID, "network")}>{summary(policyOf(detail))}</a>],
              [t.sandbox.metadata, metadata.length ? <span class="guest">{metadata.map(([name, value]) => `${line(name, 60)}=${line(value, 120)}`).join(", ")}</span> : t.common.none],
            ]}
          />
        </Panel>
        <Timeline headers={headers} id={detail.sandboxID} />
      </div>
      {detail.state === "running" && <Ports detail={detail} />}
      <Connect id={detail.sandboxID} />
      <Metrics id={detail.sandboxID} />
    </>
  );
}

function Timeline({ headers, id }: { headers: Headers; id: string }) {
  const own = phases(headers);
  const steps = own.length ? own : phases(startOf.get(id));
  const start = origin(headers) || origin(startOf.get(id));
  const most = Math.max(...steps.map((step) => step.ms), 0.001);
  return (
    <Panel title={t.sandbox.lastStart} tools={start && <Badge tone={start === "warm" ? "good" : "calm"}>{named(t.sandbox.starts, start) ?? line(start, 20)}</Badge>}>
      {steps.length === 0 ? (
        <Empty title={t.sandbox.noTimes}>{t.sandbox.noTimesText}</Empty>
      ) : (
        <ol class="steps" aria-label={t.sandbox.phases(steps.length)}>
          {steps.map((step) => (
            <li key={step.name}>
              <span>{named(t.phases, step.name) ?? line(step.name, 40)}</span>
              <span class="track">
                <span style={{ width: `${((step.ms / most) * 100).toFixed(1)}%` }} />
              </span>
              <span class="num">{millis(step.ms / 1000)}</span>
            </li>
          ))}
        </ol>
      )}
    </Panel>
  );
}
