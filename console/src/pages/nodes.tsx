// The hosts that run sandboxes.
import { get } from "../api";
import { useLive } from "../live";
import { bytes, line, span, when } from "../text";
import { Empty, Loaded, Panel, StateBadge, Table } from "../ui/parts";

interface Disk {
  mountPoint: string;
  usedBytes: number;
  totalBytes: number;
}

interface Node {
  id: string;
  version: string;
  commit: string;
  status: string;
  statusChangedAt: string;
  sandboxCount: number;
  sandboxStartingCount: number;
  pausedCount: number;
  buildCount: number;
  createSuccesses: number;
  createFails: number;
  lastEndAt?: string;
  machineInfo: { cpuModelName: string };
  metrics: { allocatedCPU: number; cpuPercent: number; cpuCount: number; allocatedMemoryBytes: number; memoryUsedBytes: number; memoryTotalBytes: number; disks: Disk[] };
  lost?: unknown[];
  stuck?: { sandboxID: string; reason: string }[];
}

export function Nodes() {
  const live = useLive((signal) => get<Node[]>("/nodes", signal), 2000);
  return (
    <>
      <div class="head">
        <h1>Nodes</h1>
      </div>
      <Panel title={live.data?.length === 1 ? "This host" : "Nodes of the cluster"}>
        <Loaded live={live}>
          {(nodes) =>
            nodes.length === 0 ? (
              <Empty title="No nodes" />
            ) : (
              <Table label="Nodes" head={["Node", "Status", "Sandboxes", "CPU", "Memory", "Disks", "Creates"]}>
                {nodes.map((node) => (
                  <Row key={node.id} node={node} />
                ))}
              </Table>
            )
          }
        </Loaded>
      </Panel>
    </>
  );
}

const part = (used: number, total: number) => `${bytes(used)} of ${bytes(total)}`;

function Row({ node }: { node: Node }) {
  const { metrics } = node;
  return (
    <tr>
      <td>
        <strong>{line(node.id, 80)}</strong>
        <Small>{`version ${line(node.version, 40)}${node.commit === "unknown" ? "" : `, ${line(node.commit, 12)}`}`}</Small>
        <Small>{line(node.machineInfo.cpuModelName, 60)}</Small>
      </td>
      <td>
        <StateBadge state={node.status} />
        <Small title={when(node.statusChangedAt)}>{`for ${span(node.statusChangedAt)}`}</Small>
        {Boolean(node.stuck?.length) && <Small>{`cannot move: ${line(node.stuck?.map((one) => `${one.sandboxID} (${one.reason})`).join(", "), 300)}`}</Small>}
        {Boolean(node.lost?.length) && <Small>{`${node.lost?.length} sandboxes not reachable`}</Small>}
      </td>
      <td class="nowrap">
        {node.sandboxCount} running
        <Small>{`${node.sandboxStartingCount} starting, ${node.pausedCount} paused, ${node.buildCount} builds`}</Small>
        {node.lastEndAt && <Small title={when(node.lastEndAt)}>{`last one ends in ${span(node.lastEndAt)}`}</Small>}
      </td>
      <td class="nowrap">
        {metrics.cpuPercent} % of {metrics.cpuCount} CPUs
        <Small>{`${metrics.allocatedCPU} vCPU in sandboxes`}</Small>
      </td>
      <td class="nowrap">
        {part(metrics.memoryUsedBytes, metrics.memoryTotalBytes)}
        <Small>{`${bytes(metrics.allocatedMemoryBytes)} in sandboxes`}</Small>
      </td>
      <td>
        {metrics.disks.map((disk) => (
          <div key={disk.mountPoint} class="nowrap">
            <code>{line(disk.mountPoint, 40)}</code> {part(disk.usedBytes, disk.totalBytes)}
          </div>
        ))}
      </td>
      <td class="nowrap">
        {node.createSuccesses}
        <Small>{`${node.createFails} failed`}</Small>
      </td>
    </tr>
  );
}

function Small({ children, title }: { children: string; title?: string }) {
  return (
    <div class="small" title={title}>
      {children}
    </div>
  );
}
