import { useMemo } from "preact/hooks";
import { ApiError, all, get, type Listed, type Metric } from "../api";
import { t } from "../i18n";
import { language } from "../i18n/language";
import { useLive } from "../live";
import { gauge, histogram, parse, quantile, sum, type Histogram, type Sample } from "../metrics";
import { link } from "../session";
import { bytes, line, millis, number, percent } from "../text";
import { Badge, Empty, Figure, Loaded, Panel, Table } from "../ui/parts";
import { Rich } from "../ui/rich";
import { Series } from "../ui/series";

const EVERY_MS = 2000;
/** What the charts show, seconds. */
const KEPT_S = 600;
const PHASES = ["confined", "resumed", "agent_ready"] as const;

/** Rows of the warm pool. */
const MOST_TEMPLATES = 10;

interface Point {
  at: number;
  starts: number;
  cores: number | null;
}

export function Overview() {
  const server = useLive(async (signal) => parse(await get<string>("/metrics", signal)), EVERY_MS);
  const fleet = useLive(loadFleet, EVERY_MS);
  const history = useHistory(server.data, fleet.data?.cores);
  return (
    <>
      <div class="head">
        <h1>{t.app.overview}</h1>
      </div>
      <Figures samples={server.data} fleet={fleet.data} history={history} />
      {server.error instanceof ApiError && server.error.status === 403 ? (
        <Panel title={t.overview.figures}>
          <Empty title={t.overview.noMetrics}>
            <Rich text={t.overview.noMetricsText} />
          </Empty>
        </Panel>
      ) : (
        <div class="grid">
          <Panel title={t.overview.starts}>
            <Loaded live={server}>{() => <Rates history={history} />}</Loaded>
          </Panel>
          <Panel title={t.overview.ladder} tools={<span class="muted">{t.overview.sinceStart}</span>}>
            <Loaded live={server}>{(samples) => <Ladder samples={samples} />}</Loaded>
          </Panel>
          <Panel title={t.overview.memory}>
            <Loaded live={server}>{(samples) => <Ledger samples={samples} fleet={fleet.data} />}</Loaded>
          </Panel>
          <Panel title={t.overview.pool}>
            <Loaded live={server}>{(samples) => <Pool samples={samples} />}</Loaded>
          </Panel>
        </div>
      )}
    </>
  );
}

interface Fleet {
  running: number;
  paused: number;
  cores: number;
  memory: number;
}

async function loadFleet(signal: AbortSignal): Promise<Fleet> {
  const sandboxes = await all<Listed>("/v2/sandboxes?state=running,paused");
  const ids = sandboxes.filter((one) => one.state === "running").map((one) => one.sandboxID);
  let cores = 0;
  let memory = 0;
  if (ids.length > 0) {
    const query = ids.slice(0, 100).map(encodeURIComponent).join(",");
    const { sandboxes: metrics } = await get<{ sandboxes: Record<string, Metric> }>(`/sandboxes/metrics?sandbox_ids=${query}`, signal);
    for (const metric of Object.values(metrics)) {
      cores += (metric.cpuUsedPct / 100) * Math.max(metric.cpuCount, 1);
      memory += metric.memUsed;
    }
  }
  return { running: ids.length, paused: sandboxes.length - ids.length, cores, memory };
}

/** Kept while other pages are shown. */
const kept: { points: Point[]; seen?: Sample[]; before?: { at: number; total: number } } = { points: [] };

function useHistory(samples: Sample[] | undefined, cores: number | undefined): Point[] {
  return useMemo(() => {
    if (!samples || samples === kept.seen) return kept.points;
    kept.seen = samples;
    const now = Date.now() / 1000;
    const total = sum(samples, "cube_start_phase_seconds_count", { phase: "agent_ready" });
    const before = kept.before;
    kept.before = { at: now, total };
    // A counter that has shrunk is that of a new server.
    if (before && now > before.at && total >= before.total) {
      const starts = (total - before.total) / (now - before.at);
      kept.points = [...kept.points.filter((point) => point.at > now - KEPT_S), { at: now, starts, cores: cores ?? null }];
    }
    return kept.points;
  }, [samples]);
}

function Figures({ samples, fleet, history }: { samples: Sample[] | undefined; fleet: Fleet | undefined; history: Point[] }) {
  const starts = samples && histogram(samples, "cube_start_phase_seconds", { phase: "agent_ready" });
  const latest = history.at(-1);
  return (
    <div class="figures">
      <Figure name={t.overview.running} value={fleet?.running ?? "–"} note={<a href={link("sandboxes")}>{t.app.sandboxes}</a>} />
      <Figure name={t.overview.paused} value={fleet?.paused ?? "–"} note={t.overview.onDisk} />
      <Figure name={t.overview.rate} value={latest ? number(latest.starts, 1) : "–"} note={starts ? t.overview.soFar(starts.count) : "–"} />
      <Figure name={t.overview.p50} value={bound(starts, 0.5)} note={t.overview.toReady} />
      <Figure name={t.overview.p95} value={bound(starts, 0.95)} note={starts ? `n = ${number(starts.count)}` : "–"} />
      <Figure name={t.overview.cpu} value={fleet ? number(fleet.cores, 2) : "–"} note={t.overview.coresUsed} />
    </div>
  );
}

/** Histograms have bounds, not values: the bucket of the quantile is shown, and no number within it. */
function bound(of: Histogram | undefined, share: 0.5 | 0.95): string {
  const found = of && quantile(of, share);
  if (!found) return t.overview.unknown;
  return found.upTo === Infinity ? `> ${millis(found.over)}` : `≤ ${millis(found.upTo)}`;
}

function Rates({ history }: { history: Point[] }) {
  const times = useMemo(() => history.map((point) => point.at), [history]);
  const starts = useMemo(() => [{ name: t.overview.startsLine, values: history.map((point) => point.starts) }], [history, language.value]);
  const cores = useMemo(() => [{ name: t.overview.coresLine, values: history.map((point) => point.cores) }], [history, language.value]);
  return (
    <>
      <Series title={t.overview.rate} times={times} lines={starts} show={(value) => number(value, 1)} top={1} />
      <Series title={t.overview.cores} times={times} lines={cores} show={(value) => number(value, 2)} top={0.1} />
    </>
  );
}

function Ladder({ samples }: { samples: Sample[] }) {
  const rows = ["true", "false"].flatMap((warm) =>
    PHASES.map((phase) => ({ warm, name: t.phases[phase], of: histogram(samples, "cube_start_phase_seconds", { phase, warm }) })),
  );
  const known = rows.filter((row) => row.of.count > 0);
  if (known.length === 0) {
    return <Empty title={t.overview.noStart}>{t.overview.noStartText}</Empty>;
  }
  return (
    <Table label={t.overview.ladder} head={[t.overview.phase, t.overview.slot, "#n", "#P50", "#P95"]}>
      {known.map((row) => (
        <tr key={row.name + row.warm}>
          <td>{row.name}</td>
          <td>{row.warm === "true" ? <Badge tone="good">{t.overview.warm}</Badge> : <Badge tone="calm">{t.overview.restored}</Badge>}</td>
          <td class="num">{number(row.of.count)}</td>
          <td class="num">{bound(row.of, 0.5)}</td>
          <td class="num">{bound(row.of, 0.95)}</td>
        </tr>
      ))}
    </Table>
  );
}

function Ledger({ samples, fleet }: { samples: Sample[]; fleet: Fleet | undefined }) {
  const free = gauge(samples, "cube_pool_available_bytes") ?? 0;
  const warm = gauge(samples, "cube_pool_warm_bytes") ?? 0;
  const limit = gauge(samples, "cube_pool_warm_limit_bytes") ?? 0;
  const used = fleet?.memory ?? 0;
  const total = Math.max(free + warm + used, 1);
  const next = gauge(samples, "cube_pool_expected_bytes");
  const part = (value: number) => ({ width: `${((value / total) * 100).toFixed(1)}%` });
  return (
    <div class="ledger">
      <div class="meter" role="img" aria-label={t.overview.meter(bytes(used), bytes(warm), bytes(free))}>
        <span style={part(used)} />
        <span style={part(warm)} />
      </div>
      <div>
        <div class="row">
          <span class="key">{t.overview.privateMemory}</span>
          <strong class="num">{bytes(used)}</strong>
        </div>
        <div class="row">
          <span class="key key-2">{t.overview.warmMemory}</span>
          <strong class="num">
            {t.common.sum(bytes(warm), bytes(limit))}
          </strong>
        </div>
        <div class="row">
          <span>{t.overview.available}</span>
          <strong class="num">{bytes(free)}</strong>
        </div>
        <div class="row">
          <span>{t.overview.expected}</span>
          <strong class="num">{bytes(next)}</strong>
        </div>
      </div>
    </div>
  );
}

function Pool({ samples }: { samples: Sample[] }) {
  const of = (name: string) => new Map(samples.filter((s) => s.name === `cube_pool_template_${name}`).map((s) => [s.labels["template"] ?? "", s.value]));
  const [warm, wanted, loaded, hits, misses] = [of("warm"), of("wanted"), of("loaded"), of("hits_total"), of("misses_total")];
  if (warm.size === 0) return <Empty title={t.overview.noTemplate}>{t.overview.noTemplateText}</Empty>;
  const uses = (name: string) => (hits.get(name) ?? 0) + (misses.get(name) ?? 0);
  const names = [...warm.keys()].sort((a, b) => uses(b) - uses(a) || a.localeCompare(b));
  return (
    <>
      <Table label={t.overview.pool} head={[t.overview.template, `#${t.overview.warmCount}`, `#${t.overview.wanted}`, `#${t.overview.hits}`, t.overview.memory]}>
        {names.slice(0, MOST_TEMPLATES).map((name) => {
          const all = uses(name);
          return (
            <tr key={name}>
              <td>
                <span class="guest">{line(name, 60)}</span>
              </td>
              <td class="num">{warm.get(name)}</td>
              <td class="num">{wanted.get(name)}</td>
              <td class="num">{all ? t.overview.hitsOf(percent((hits.get(name) ?? 0) / all), all) : "–"}</td>
              <td>{loaded.get(name) ? <Badge tone="info">{t.overview.loaded}</Badge> : <Badge tone="calm">{t.overview.onDisk}</Badge>}</td>
            </tr>
          );
        })}
      </Table>
      {names.length > MOST_TEMPLATES && <p class="pad muted">{t.overview.notShown(names.length - MOST_TEMPLATES)}</p>}
    </>
  );
}
