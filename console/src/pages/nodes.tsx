// The hosts that run sandboxes.
import { get } from "../api";
import { t } from "../i18n";
import { useLive } from "../live";
import { bytes, line, number, percent, span, when } from "../text";
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
        <h1>{t.app.nodes}</h1>
      </div>
      <Panel title={live.data?.length === 1 ? t.nodes.one : t.nodes.all}>
        <Loaded live={live}>
          {(nodes) =>
            nodes.length === 0 ? (
              <Empty title={t.nodes.none} />
            ) : (
              <Table label={t.app.nodes} head={[t.nodes.node, t.nodes.status, t.app.sandboxes, t.nodes.cpu, t.nodes.memory, t.nodes.disks, t.nodes.creates]}>
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

const part = (used: number, total: number) => t.common.sum(bytes(used), bytes(total));

function Row({ node }: { node: Node }) {
  const { metrics } = node;
  return (
    <tr>
      <td>
        <strong>{line(node.id, 80)}</strong>
        <Small>{t.nodes.version(line(node.version, 40), node.commit === "unknown" ? "" : line(node.commit, 12))}</Small>
        <Small>{line(node.machineInfo.cpuModelName, 60)}</Small>
      </td>
      <td>
        <StateBadge state={node.status} />
        <Small title={when(node.statusChangedAt)}>{t.nodes.since(span(node.statusChangedAt))}</Small>
        {Boolean(node.stuck?.length) && <Small>{t.nodes.stuck(line(node.stuck?.map((one) => t.nodes.stuckOne(one.sandboxID, one.reason)).join(", "), 300))}</Small>}
        {Boolean(node.lost?.length) && <Small>{t.nodes.lost(node.lost?.length ?? 0)}</Small>}
      </td>
      <td class="nowrap">
        {t.nodes.running(node.sandboxCount)}
        <Small>{t.nodes.others(node.sandboxStartingCount, node.pausedCount, node.buildCount)}</Small>
        {node.lastEndAt && <Small title={when(node.lastEndAt)}>{t.nodes.lastEnd(span(node.lastEndAt))}</Small>}
      </td>
      <td class="nowrap">
        {t.nodes.cpus(percent(metrics.cpuPercent / 100), metrics.cpuCount)}
        <Small>{t.nodes.vcpus(metrics.allocatedCPU)}</Small>
      </td>
      <td class="nowrap">
        {part(metrics.memoryUsedBytes, metrics.memoryTotalBytes)}
        <Small>{t.nodes.inSandboxes(bytes(metrics.allocatedMemoryBytes))}</Small>
      </td>
      <td>
        {metrics.disks.map((disk) => (
          <div key={disk.mountPoint} class="nowrap">
            <code>{line(disk.mountPoint, 40)}</code> {part(disk.usedBytes, disk.totalBytes)}
          </div>
        ))}
      </td>
      <td class="nowrap">
        {number(node.createSuccesses)}
        <Small>{t.nodes.failed(node.createFails)}</Small>
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
