import { all, type Secret } from "../api";
import { useLive } from "../live";
import { line, when } from "../text";
import { Empty, Loaded, Panel, Table } from "../ui/parts";

export function Secrets() {
  const live = useLive(() => all<Secret>("/secrets"), 5000);
  return (
    <>
      <div class="head">
        <h1>Secrets</h1>
      </div>
      <Panel title="Names" tools={<span class="muted">values never leave the server</span>}>
        <Loaded live={live}>
          {(secrets) =>
            secrets.length === 0 ? (
              <Empty title="No secrets">
                The egress proxy adds them to requests of sandboxes, which never see them. Make one with <code>cube secret create NAME</code>.
              </Empty>
            ) : (
              <Table label="Secrets" head={["Name", "Id", "#Version", "Created", "Changed"]}>
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
