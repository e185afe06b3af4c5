import { get, type Key } from "../api";
import { useLive } from "../live";
import { line, when } from "../text";
import { Badge, Empty, Loaded, Panel, Table } from "../ui/parts";

export function Keys() {
  const live = useLive((signal) => get<Key[]>("/api-keys", signal), 5000);
  return (
    <>
      <div class="head">
        <h1>Keys</h1>
      </div>
      <Panel title="Keys of this server">
        <Loaded live={live}>
          {(keys) =>
            keys.length === 0 ? (
              <Empty title="This server takes requests without a key">
                It listens on loopback addresses only. <code>cube-api key new NAME</code> makes a key; the server stores its hash.
              </Empty>
            ) : (
              <Table label="Keys" head={["Name", "Id", "Scopes", "Created"]}>
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
        Keys are made and revoked on the host: <code>cube-api key new</code>, <code>cube-api key revoke</code>. Every key sees every sandbox.
      </p>
    </>
  );
}
