// The nodes of a cluster, with whatever fields the server gives each.
import { get } from "../api";
import { useLive } from "../live";
import { line } from "../text";
import { Empty, Loaded, Panel, StateBadge, Table } from "../ui/parts";

type Node = Record<string, unknown>;
const MOST_COLUMNS = 12;

export function Nodes() {
  const live = useLive((signal) => get<Node[] | { nodes: Node[] }>("/nodes", signal), 2000);
  return (
    <>
      <div class="head">
        <h1>Nodes</h1>
      </div>
      <Panel title="Nodes of the cluster">
        <Loaded live={live}>
          {(answer) => {
            const nodes = Array.isArray(answer) ? answer : (answer.nodes ?? []);
            const names = [...new Set(nodes.flatMap((node) => Object.keys(node)))].slice(0, MOST_COLUMNS);
            if (nodes.length === 0) return <Empty title="No nodes" />;
            return (
              <Table label="Nodes" head={names.map((name) => line(title(name), 40))}>
                {nodes.map((node, at) => (
                  <tr key={at}>
                    {names.map((name) => (
                      <td key={name} class={typeof node[name] === "number" ? "num" : ""}>
                        {["state", "status"].includes(name) ? <StateBadge state={String(node[name])} /> : <span class="guest">{text(node[name])}</span>}
                      </td>
                    ))}
                  </tr>
                ))}
              </Table>
            );
          }}
        </Loaded>
      </Panel>
    </>
  );
}

function title(name: string): string {
  const words = name.replace(/([a-z])([A-Z])/g, "$1 $2").replace(/_/g, " ");
  return words.charAt(0).toUpperCase() + words.slice(1);
}

function text(value: unknown): string {
  if (value === null || value === undefined) return "–";
  return line(typeof value === "object" ? JSON.stringify(value) : value, 200);
}
