// The dialog that starts a sandbox from a template or a snapshot.
import { useState } from "preact/hooks";
import { all, ask, get, type Sandbox, type Snapshot, type Template } from "../api";
import { t } from "../i18n";
import { useLive } from "../live";
import { arrival } from "../session";
import { startOf } from "../sandbox/start";
import { line } from "../text";
import { timeoutIn } from "../ui/minutes";
import { Button, Choice, Dialog, Field, Loaded } from "../ui/parts";
import { nameOf } from "./names";

type Origin = readonly [string, string];

async function origins(signal: AbortSignal): Promise<Origin[]> {
  const [templates, snapshots] = await Promise.all([get<Template[]>("/templates", signal), all<Snapshot>("/snapshots").catch(() => [])]);
  const taken = new Set(snapshots.map((one) => one.snapshotID));
  const ready = templates.filter((one) => one.buildStatus === "ready" && !taken.has(one.templateID));
  return [
    ...ready.map((one): Origin => [one.names[0] ?? one.templateID, line(nameOf(one), 80)]),
    ...snapshots.map((one): Origin => [one.snapshotID, t.create.snapshot(line(one.names[0] ?? one.snapshotID, 80))]),
  ];
}

const ACCESS: Record<string, object> = { default: {}, none: { allow_internet_access: false }, internet: { allow_internet_access: true } };

/** `from`: the template or snapshot that is chosen at first. */
export function NewSandbox({ onClose, from = "" }: { onClose: () => void; from?: string }) {
  const live = useLive(origins, 0);
  const [chosen, setChosen] = useState(from);
  const [minutes, setMinutes] = useState("15");
  const [access, setAccess] = useState("default");
  const ids = (live.data ?? []).map(([id]) => id);
  const origin = chosen || (ids.includes("base") ? "base" : (ids[0] ?? ""));
  const create = async () => {
    const arrive = arrival();
    const { body: made, headers } = await timeoutIn(minutes, (timeout) => ask<Sandbox>("POST", "/v2/sandboxes", { templateID: origin, timeout, ...ACCESS[access] }));
    startOf.set(made.sandboxID, headers);
    onClose();
    arrive(t.create.started(made.sandboxID), "sandboxes", made.sandboxID, "terminal");
  };
  return (
    <Dialog
      title={t.sandboxes.new}
      onClose={onClose}
      action={
        <Button kind="main" onClick={create} disabled={!origin}>
          {t.create.start}
        </Button>
      }
    >
      <Loaded live={live}>
        {(options) => (
          <>
            <Choice label={t.create.template} value={origin} onInput={setChosen} options={options} />
            <Field label={t.create.timeout} type="number" min="1" value={minutes} onInput={setMinutes} hint={t.create.timeoutHint} />
            <Choice
              label={t.create.outbound}
              value={access}
              onInput={setAccess}
              options={[
                ["default", t.create.serverDefault],
                ["none", t.create.nothing],
                ["internet", t.create.internet],
              ]}
            />
          </>
        )}
      </Loaded>
    </Dialog>
  );
}
