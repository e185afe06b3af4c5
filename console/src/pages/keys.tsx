import { get, type Key } from "../api";
import { t } from "../i18n";
import { useLive } from "../live";
import { line, when } from "../text";
import { Badge, Empty, Loaded, Panel, Table } from "../ui/parts";
import { Rich } from "../ui/rich";

export function Keys() {
  const live = useLive((signal) => get<Key[]>("/api-keys", signal), 5000);
  return (
    <>
      <div class="head">
        <h1>{t.app.keys}</h1>
      </div>
      <Panel title={t.keys.title}>
        <Loaded live={live}>
          {(keys) =>
            keys.length === 0 ? (
              <Empty title={t.keys.none}>
                <Rich text={t.keys.noneText} />
              </Empty>
            ) : (
              <Table label={t.app.keys} head={[t.common.name, t.common.id, t.keys.scopes, t.common.created]}>
                {keys.map((key) => (
                  <tr key={key.id}>
                    <td>
                      <span class="guest">{line(key.name, 128)}</span>
                    </td>
                    <td class="id">{key.id}</td>
                    <td>
                      <div class="tools">
                        {key.scopes.map((scope) => (
                          <Badge key={scope} tone="calm">
                            {line(scope, 40)}
                          </Badge>
                        ))}
                      </div>
                    </td>
                    <td class="nowrap">{when(key.createdAt)}</td>
                  </tr>
                ))}
              </Table>
            )
          }
        </Loaded>
      </Panel>
      <p class="muted">
        <Rich text={t.keys.hint} />
      </p>
    </>
  );
}
