import { all, type Secret } from "../api";
import { t } from "../i18n";
import { useLive } from "../live";
import { line, when } from "../text";
import { Empty, Loaded, Panel, Table } from "../ui/parts";
import { Rich } from "../ui/rich";

export function Secrets() {
  const live = useLive(() => all<Secret>("/secrets"), 5000);
  return (
    <>
      <div class="head">
        <h1>{t.app.secrets}</h1>
      </div>
      <Panel title={t.secrets.names} tools={<span class="muted">{t.secrets.stay}</span>}>
        <Loaded live={live}>
          {(secrets) =>
            secrets.length === 0 ? (
              <Empty title={t.secrets.none}>
                <Rich text={t.secrets.noneText} />
              </Empty>
            ) : (
              <Table label={t.app.secrets} head={[t.common.name, t.common.id, `#${t.secrets.version}`, t.common.created, t.secrets.changed]}>
                {secrets.map((secret) => (
                  <tr key={secret.secretID}>
                    <td>
                      <span class="guest">{line(secret.name, 128)}</span>
                    </td>
                    <td class="id">{secret.secretID}</td>
                    <td class="num">{secret.currentVersion}</td>
                    <td class="nowrap">{when(secret.createdAt)}</td>
                    <td class="nowrap">{when(secret.updatedAt)}</td>
                  </tr>
                ))}
              </Table>
            )
          }
        </Loaded>
      </Panel>
    </>
  );
}
