// Secrets: their names, hosts and metadata. A value goes to the server and never comes back.
import { useState } from "preact/hooks";
import { all, at, post, remove, type Secret } from "../api";
import { t } from "../i18n";
import { useLive } from "../live";
import { notify } from "../session";
import { line, when } from "../text";
import { pairs, pairsText, words } from "../ui/lists";
import { Button, Confirm, Dialog, Empty, Field, Loaded, Panel, Table } from "../ui/parts";
import { Rich } from "../ui/rich";

export function Secrets() {
  const live = useLive(() => all<Secret>("/secrets"), 5000);
  const [edited, setEdited] = useState<Secret | "new">();
  const [gone, setGone] = useState<Secret>();
  return (
    <>
      <div class="head">
        <h1>{t.app.secrets}</h1>
        <Button kind="main" onClick={() => setEdited("new")}>
          {t.secrets.new}
        </Button>
      </div>
      <Panel title={t.secrets.names} tools={<span class="muted">{t.secrets.stay}</span>}>
        <Loaded live={live}>
          {(secrets) =>
            secrets.length === 0 ? (
              <Empty title={t.secrets.none}>
                <Rich text={t.secrets.noneText} />
              </Empty>
            ) : (
              <Table label={t.app.secrets} head={[t.common.name, t.secrets.hosts, t.secrets.metadata, `#${t.secrets.version}`, t.secrets.changed, ""]}>
                {secrets.map((secret) => (
                  <tr key={secret.secretID}>
                    <td>
                      <span class="guest">{line(secret.name, 128)}</span>
                      <span class="small id">{secret.secretID}</span>
                    </td>
                    <td>
                      <span class="guest">{line(secret.hosts?.join(", ") || t.secrets.anyHost, 400)}</span>
                    </td>
                    <td>
                      <span class="guest muted">{line(pairsText(secret.metadata), 400)}</span>
                    </td>
                    <td class="num">{secret.currentVersion}</td>
                    <td class="nowrap">{when(secret.updatedAt)}</td>
                    <td>
                      <div class="tools">
                        <Button onClick={() => setEdited(secret)} label={t.secrets.editOf(line(secret.name, 80))}>
                          {t.common.edit}
                        </Button>
                        <Button kind="danger" onClick={() => setGone(secret)} label={t.secrets.deleteOf(line(secret.name, 80))}>
                          {t.common.delete}
                        </Button>
                      </div>
                    </td>
                  </tr>
                ))}
              </Table>
            )
          }
        </Loaded>
      </Panel>
      {edited && <Edit secret={edited === "new" ? undefined : edited} onClose={() => setEdited(undefined)} done={live.reload} />}
      {gone && (
        <Confirm
          title={t.secrets.deleteAsk}
          name={gone.name}
          text={t.secrets.deleteText}
          onClose={() => setGone(undefined)}
          confirm={async () => {
            await remove(at`/secrets/${gone.secretID}`);
            notify("good", t.secrets.deleted(line(gone.name, 80)));
            live.reload();
          }}
        />
      )}
    </>
  );
}

/** Makes a secret, or stores a new version of one. The API changes hosts and metadata only together with the value. */
function Edit({ secret, onClose, done }: { secret: Secret | undefined; onClose: () => void; done: () => void }) {
  const before = { hosts: (secret?.hosts ?? []).join("\n"), metadata: pairsText(secret?.metadata) };
  const [name, setName] = useState("");
  const [value, setValue] = useState("");
  const [hosts, setHosts] = useState(before.hosts);
  const [metadata, setMetadata] = useState(before.metadata);
  const save = async () => {
    // What was not changed here keeps what the form cannot show, such as line ends in metadata.
    const changed = { ...(hosts !== before.hosts && { hosts: words(hosts) }), ...(metadata !== before.metadata && { metadata: pairs(metadata) }) };
    const made = await post<Secret>(secret ? at`/secrets/${secret.secretID}` : "/secrets", { ...(!secret && { name: name.trim() }), value, ...changed });
    notify("good", t.secrets.saved(line(made.name, 80), made.currentVersion));
    onClose();
    done();
  };
  return (
    <Dialog
      title={secret ? t.secrets.editOf(line(secret.name, 80)) : t.secrets.new}
      onClose={onClose}
      action={
        <Button kind="main" onClick={save} disabled={!value || (!secret && !name.trim())}>
          {t.common.save}
        </Button>
      }
    >
      {!secret && <Field label={t.common.name} value={name} onInput={setName} hint={t.secrets.nameHint} />}
      <Field label={t.secrets.value} type="password" value={value} onInput={setValue} hint={secret ? t.secrets.valueAgain : t.secrets.valueHint} />
      <Field label={t.secrets.hosts} isLong value={hosts} onInput={setHosts} hint={t.secrets.hostsHint} />
      <Field label={t.secrets.metadata} isLong value={metadata} onInput={setMetadata} hint={t.common.pairsHint} />
    </Dialog>
  );
}
