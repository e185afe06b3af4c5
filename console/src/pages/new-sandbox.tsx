// The dialog that starts a sandbox from a template or a snapshot.
import { useState } from "preact/hooks";
import { all, ask, get, type Sandbox, type Snapshot, type Template } from "../api";
import { t } from "../i18n";
import { useLive } from "../live";
import { arrival } from "../session";
import { optionsOf, REST, type Rest } from "../sandbox/policy";
import { startOf } from "../sandbox/start";
import { line } from "../text";
import { pairs, rules, words } from "../ui/lists";
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

/** What is left out of a request if it is as on the server: `atEnd` is `kill`, `rest` is `default`, all others are empty. */
const AS_SERVER = { minutes: "15", atEnd: "kill", metadata: "", envs: "", rest: "default", allow: "", deny: "", rules: "" };
type Form = typeof AS_SERVER;

/** Throws with what cannot be read. */
function requestOf(form: Form): object {
  const { allow_internet_access, ...lists } = optionsOf({ rest: form.rest as Rest, allowed: words(form.allow), denied: words(form.deny) });
  const network = { ...lists, ...(form.rules.trim() && { rules: rules(form.rules) }) };
  return {
    metadata: pairs(form.metadata),
    envVars: pairs(form.envs),
    autoPause: form.atEnd === "pause",
    ...(allow_internet_access !== undefined && { allow_internet_access }),
    ...(Object.keys(network).length > 0 && { network }),
  };
}

/** `from`: the template or snapshot that is chosen at first. */
export function NewSandbox({ onClose, from = "" }: { onClose: () => void; from?: string }) {
  const live = useLive(origins, 0);
  const [chosen, setChosen] = useState(from);
  const [form, setForm] = useState(AS_SERVER);
  const field = (name: keyof Form) => ({ value: form[name], onInput: (value: string) => setForm((before) => ({ ...before, [name]: value })) });
  const ids = (live.data ?? []).map(([id]) => id);
  const origin = chosen || (ids.includes("base") ? "base" : (ids[0] ?? ""));
  const create = async () => {
    const arrive = arrival();
    const request = { templateID: origin, ...requestOf(form) };
    const { body: made, headers } = await timeoutIn(form.minutes, (timeout) => ask<Sandbox>("POST", "/v2/sandboxes", { ...request, timeout }));
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
            <div class="form two">
              <Field label={t.create.timeout} type="number" min="1" {...field("minutes")} />
              <Choice label={t.create.atEnd} options={[["kill", t.create.kill], ["pause", t.create.pause]]} {...field("atEnd")} />
            </div>
            <Choice label={t.create.outbound} options={REST.map((rest) => [rest, t.create.rest[rest]])} {...field("rest")} />
            <details>
              <summary>{t.create.rules}</summary>
              <div class="form">
                <Field label={t.network.allow} isLong hint={t.create.allowHint} {...field("allow")} />
                <Field label={t.network.deny} isLong hint={t.network.denyHint} {...field("deny")} />
                <Field label={t.create.headers} isLong hint={t.create.headersHint} {...field("rules")} />
              </div>
            </details>
            <details>
              <summary>{t.create.data}</summary>
              <div class="form">
                <Field label={t.sandbox.metadata} isLong hint={t.common.pairsHint} {...field("metadata")} />
                <Field label={t.create.envs} isLong hint={t.create.envsHint} {...field("envs")} />
              </div>
            </details>
          </>
        )}
      </Loaded>
    </Dialog>
  );
}
