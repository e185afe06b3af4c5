// Templates, the sandboxes of each, the snapshots of each sandbox, and so on.
import { useState } from "preact/hooks";
import { all, at, get, remove, type Listed, type Snapshot, type Template } from "../api";
import { t } from "../i18n";
import { useLive } from "../live";
import { link, notify } from "../session";
import { bytes, line, when } from "../text";
import { Badge, Button, Confirm, Empty, Loaded, Panel, StateBadge } from "../ui/parts";
import { nameOf } from "./names";
import { NewSandbox } from "./new-sandbox";

interface Forest {
  templates: Template[];
  sandboxes: Listed[];
  snapshots: Snapshot[];
}

const MOST_DEEP = 12;

export function Snapshots() {
  const [gone, setGone] = useState<Snapshot>();
  const [from, setFrom] = useState<Snapshot>();
  const live = useLive(async (signal): Promise<Forest> => {
    const [templates, sandboxes, snapshots] = await Promise.all([get<Template[]>("/templates", signal), all<Listed>("/v2/sandboxes?state=running,paused"), all<Snapshot>("/snapshots")]);
    return { templates, sandboxes, snapshots };
  }, 5000);
  return (
    <>
      <div class="head">
        <h1>{t.app.snapshots}</h1>
      </div>
      <Panel title={t.snapshots.byOrigin} tools={live.data && <span class="muted">{t.snapshots.count(live.data.snapshots.length)}</span>}>
        <Loaded live={live}>{(forest) => <Trees forest={forest} drop={setGone} start={setFrom} />}</Loaded>
      </Panel>
      {from && <NewSandbox from={from.snapshotID} onClose={() => setFrom(undefined)} />}
      {gone && (
        <Confirm
          title={t.snapshots.deleteAsk}
          name={gone.names[0] ?? gone.snapshotID}
          text={t.snapshots.deleteText}
          onClose={() => setGone(undefined)}
          confirm={async () => {
            await remove(at`/templates/${gone.snapshotID}`);
            notify("good", t.snapshots.deleted);
            live.reload();
          }}
        />
      )}
    </>
  );
}

function Trees({ forest, drop, start }: Omit<Node, "deep">) {
  const { templates, sandboxes, snapshots } = forest;
  if (snapshots.length === 0) {
    return <Empty title={t.snapshots.none}>{t.snapshots.noneText}</Empty>;
  }
  const known = new Set(sandboxes.map((one) => one.sandboxID));
  const orphans = snapshots.filter((one) => !one.sourceSandboxID || !known.has(one.sourceSandboxID));
  const isSnapshot = new Set(snapshots.map((one) => one.snapshotID));
  const roots = templates.filter((one) => !isSnapshot.has(one.templateID) && sandboxes.some((sandbox) => sandbox.templateID === one.templateID));
  return (
    <ul class="tree" aria-label={t.snapshots.tree}>
      {roots.map((template) => (
        <li key={template.templateID}>
          <div class="row">
            <Badge tone="calm">{t.snapshots.template}</Badge>
            <a href={link("templates", template.templateID)}>{line(nameOf(template), 80)}</a>
          </div>
          <OfTemplate id={template.templateID} forest={forest} drop={drop} start={start} deep={0} />
        </li>
      ))}
      {orphans.map((one) => (
        <SnapshotNode key={one.snapshotID} snapshot={one} forest={forest} drop={drop} start={start} deep={0} note={one.sourceSandboxID ? t.snapshots.ofEnded(one.sourceSandboxID) : t.snapshots.ofUnknown} />
      ))}
    </ul>
  );
}

interface Node {
  forest: Forest;
  drop: (snapshot: Snapshot) => void;
  start: (snapshot: Snapshot) => void;
  deep: number;
}

function OfTemplate({ id, forest, drop, start, deep }: Node & { id: string }) {
  const sandboxes = forest.sandboxes.filter((one) => one.templateID === id);
  if (sandboxes.length === 0 || deep > MOST_DEEP) return null;
  return (
    <ul>
      {sandboxes.map((sandbox) => {
        const made = forest.snapshots.filter((one) => one.sourceSandboxID === sandbox.sandboxID);
        return (
          <li key={sandbox.sandboxID}>
            <div class="row">
              <StateBadge state={sandbox.state} />
              <a class="id" href={link("sandboxes", sandbox.sandboxID)}>
                {sandbox.sandboxID}
              </a>
            </div>
            {made.length > 0 && (
              <ul>
                {made.map((one) => (
                  <SnapshotNode key={one.snapshotID} snapshot={one} forest={forest} drop={drop} start={start} deep={deep + 1} />
                ))}
              </ul>
            )}
          </li>
        );
      })}
    </ul>
  );
}

function SnapshotNode({ snapshot, forest, drop, start, deep, note }: Node & { snapshot: Snapshot; note?: string }) {
  return (
    <li>
      <div class="row">
        <Badge tone="info">{t.snapshots.snapshot}</Badge>
        <span class="guest">
          <strong>{line(snapshot.names.join(", ") || snapshot.snapshotID, 160)}</strong>
        </span>
        <span class="muted">
          {[snapshot.createdAt && when(snapshot.createdAt), snapshot.storedBytes !== undefined && bytes(snapshot.storedBytes), note].filter(Boolean).join(" · ")}
        </span>
        <Button label={t.snapshots.startOf(line(snapshot.names[0] ?? snapshot.snapshotID, 60))} onClick={() => start(snapshot)}>
          {t.snapshots.start}
        </Button>
        <Button kind="danger" label={t.snapshots.deleteOf(line(snapshot.names[0] ?? snapshot.snapshotID, 60))} onClick={() => drop(snapshot)}>
          {t.common.delete}
        </Button>
      </div>
      <OfTemplate id={snapshot.snapshotID} forest={forest} drop={drop} start={start} deep={deep} />
    </li>
  );
}
