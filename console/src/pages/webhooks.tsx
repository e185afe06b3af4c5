// Webhooks, and what became of the events that were sent to them.
import { useState } from "preact/hooks";
import { ask, at, get, post, remove, type Deliveries, type DeliveryStats, type Webhook } from "../api";
import { named, t } from "../i18n";
import { useLive } from "../live";
import { arrival, link, notify, route } from "../session";
import { bytes, clean, line, millis, number, when } from "../text";
import { Copy } from "../ui/copy";
import { Badge, Button, Checks, Choice, Confirm, Dialog, Empty, Facts, Field, Figure, Loaded, Panel, Table } from "../ui/parts";
import { EventCells, KINDS, typeOf } from "./events";

const TYPES = KINDS.map(typeOf);
const kindText = (type: string) => named(t.events.kinds, type.split(".").at(-1) ?? "") ?? line(type, 60);

export function Webhooks() {
  const [, id] = route.value;
  return id ? <One key={id} id={id} /> : <List />;
}

function List() {
  const live = useLive((signal) => get<Webhook[]>("/events/webhooks", signal), 5000);
  const [isNew, setIsNew] = useState(false);
  return (
    <>
      <div class="head">
        <h1>{t.app.webhooks}</h1>
        <Button kind="main" onClick={() => setIsNew(true)}>
          {t.webhooks.new}
        </Button>
      </div>
      <Panel title={t.webhooks.all}>
        <Loaded live={live}>
          {(hooks) =>
            hooks.length === 0 ? (
              <Empty title={t.webhooks.none}>{t.webhooks.noneText}</Empty>
            ) : (
              <Table label={t.app.webhooks} head={[t.common.name, t.common.state, t.webhooks.url, t.webhooks.events, t.common.created]}>
                {hooks.map((hook) => (
                  <tr key={hook.id}>
                    <td>
                      <a href={link("webhooks", hook.id)}>
                        <span class="guest name">{line(hook.name, 128)}</span>
                      </a>
                    </td>
                    <td>
                      <Enabled hook={hook} />
                    </td>
                    <td>
                      <span class="guest mono">{line(hook.url, 200)}</span>
                    </td>
                    <td>{hook.events.map(kindText).join(t.common.comma)}</td>
                    <td class="nowrap">{when(hook.createdAt)}</td>
                  </tr>
                ))}
              </Table>
            )
          }
        </Loaded>
      </Panel>
      {isNew && <Edit hook={undefined} onClose={() => setIsNew(false)} done={live.reload} />}
    </>
  );
}

function Enabled({ hook }: { hook: Webhook }) {
  return <Badge tone={hook.enabled ? "good" : "calm"}>{hook.enabled ? t.webhooks.enabled : t.webhooks.disabled}</Badge>;
}

function One({ id }: { id: string }) {
  const [dialog, setDialog] = useState<"" | "edit" | "delete">("");
  const [status, setStatus] = useState("");
  const live = useLive((signal) => get<Webhook>(at`/events/webhooks/${id}`, signal), 5000, [id]);
  const stats = useLive((signal) => get<DeliveryStats>(at`/events/webhooks/${id}/stats`, signal), 3000, [id]);
  const query = `?limit=50${status && `&deliveryStatus=${status}`}`;
  const deliveries = useLive((signal) => get<Deliveries>(at`/events/webhooks/${id}/deliveries` + query, signal), 3000, [id, status]);
  const hook = live.data;
  const toggle = async () => {
    await ask("PATCH", at`/events/webhooks/${id}`, { enabled: !hook?.enabled });
    live.reload();
  };
  return (
    <>
      <div class="head">
        <h1>{line(hook?.name ?? id, 128)}</h1>
        {hook && <Enabled hook={hook} />}
        {hook && <Button onClick={toggle}>{hook.enabled ? t.webhooks.disable : t.webhooks.enable}</Button>}
        {hook && <Button onClick={() => setDialog("edit")}>{t.common.edit}</Button>}
        <Button kind="danger" onClick={() => setDialog("delete")}>
          {t.common.delete}
        </Button>
        <p class="sub mono">{line(id, 60)}</p>
      </div>
      <Loaded live={stats}>{(counts) => <Stats of={counts} />}</Loaded>
      <Panel title={t.sandbox.details}>
        <Loaded live={live}>
          {(one) => (
            <Facts
              of={[
                [t.webhooks.url, <span class="guest mono">{line(one.url, 2048)}</span>],
                [t.webhooks.events, one.events.map(kindText).join(t.common.comma)],
                [t.common.created, when(one.createdAt)],
              ]}
            />
          )}
        </Loaded>
      </Panel>
      <Panel title={t.webhooks.deliveries} tools={<span class="muted">{t.webhooks.kept}</span>}>
        <div class="filters">
          <Choice label={t.common.state} value={status} onInput={setStatus} options={[["", t.events.all], ["success", t.webhooks.success], ["failed", t.webhooks.failed]]} />
        </div>
        <Loaded live={deliveries}>{({ data }) => (data.length ? <Attempts of={data} /> : <Empty title={t.webhooks.noDeliveries} />)}</Loaded>
      </Panel>
      {dialog === "edit" && hook && <Edit hook={hook} onClose={() => setDialog("")} done={live.reload} />}
      {dialog === "delete" && (
        <Confirm
          title={t.webhooks.deleteAsk}
          name={hook?.name ?? id}
          text={t.webhooks.deleteText}
          onClose={() => setDialog("")}
          confirm={async () => {
            const arrive = arrival();
            await remove(at`/events/webhooks/${id}`);
            arrive(t.webhooks.deleted, "webhooks");
          }}
        />
      )}
    </>
  );
}

function Stats({ of: { total, failed, durationMs } }: { of: DeliveryStats }) {
  const time = (ms: number) => (total ? millis(ms / 1000) : "–");
  return (
    <div class="figures">
      <Figure name={t.webhooks.attempts} value={number(total)} note={t.webhooks.lastDay} />
      <Figure name={t.webhooks.failedAttempts} value={number(failed)} />
      <Figure name={t.webhooks.average} value={time(durationMs.average)} note={t.webhooks.range(time(durationMs.minimum), time(durationMs.maximum))} />
    </div>
  );
}

function Attempts({ of }: { of: Deliveries["data"] }) {
  return (
    <Table label={t.webhooks.deliveries} head={[t.network.time, t.events.type, t.events.sandbox, t.webhooks.answer, `#${t.webhooks.duration}`, t.webhooks.body]}>
      {of.flatMap((event) =>
        event.attempts.map((attempt) => (
          <tr key={attempt.id}>
            <EventCells at={attempt.timestamp} type={event.eventType} sandbox={event.sandboxId} />
            <td>
              <Badge tone={attempt.status === "success" ? "good" : "bad"}>{attempt.responseHttpStatusCode ?? (attempt.status === "success" ? t.webhooks.success : t.webhooks.failed)}</Badge>
              {attempt.errorMessage && <span class="guest small">{line(attempt.errorMessage, 200)}</span>}
            </td>
            <td class="num">{millis(attempt.durationMs / 1000)}</td>
            <td>
              <details>
                <summary>{bytes(attempt.requestBody.length)}</summary>
                <pre class="guest">{clean(attempt.requestBody, 4000)}</pre>
              </details>
            </td>
          </tr>
        )),
      )}
    </Table>
  );
}

function newSecret(): string {
  return [...crypto.getRandomValues(new Uint8Array(24))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Registers a webhook, or changes one. The secret that signs its requests can be set, and is never shown again. */
function Edit({ hook, onClose, done }: { hook: Webhook | undefined; onClose: () => void; done: () => void }) {
  const [name, setName] = useState(hook?.name ?? "");
  const [url, setUrl] = useState(hook?.url ?? "");
  const [events, setEvents] = useState(hook?.events ?? TYPES.filter((type) => type !== typeOf("refused")));
  const [secret, setSecret] = useState(() => (hook ? "" : newSecret()));
  const save = async () => {
    const body = { name: name.trim(), url: url.trim(), events, ...(secret && { signatureSecret: secret }) };
    if (hook) await ask("PATCH", at`/events/webhooks/${hook.id}`, body);
    else await post("/events/webhooks", body);
    notify("good", t.webhooks.saved(line(body.name, 80)));
    onClose();
    done();
  };
  return (
    <Dialog
      title={hook ? t.webhooks.edit : t.webhooks.new}
      onClose={onClose}
      action={
        <Button kind="main" onClick={save} disabled={!name.trim() || !url.trim() || events.length === 0 || (!hook && !secret)}>
          {t.common.save}
        </Button>
      }
    >
      <Field label={t.common.name} value={name} onInput={setName} />
      <Field label={t.webhooks.url} value={url} onInput={setUrl} placeholder="https://hooks.example.com/cube" />
      <Checks label={t.webhooks.events} value={events} onInput={setEvents} options={TYPES.map((type) => [type, kindText(type)])} />
      <Field label={t.webhooks.secret} value={secret} onInput={setSecret} hint={hook ? t.webhooks.secretKept : t.webhooks.secretHint} />
      {secret && <Copy text={secret} what={t.webhooks.theSecret} />}
    </Dialog>
  );
}
