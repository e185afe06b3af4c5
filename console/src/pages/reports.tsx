// Reports of benchmark runs: from the server's directory, and from files that the user opens, which go nowhere.
import { useRef, useState } from "preact/hooks";
import { ApiError, at, get, type BenchmarkRun } from "../api";
import { t } from "../i18n";
import { useLive } from "../live";
import { notify } from "../session";
import { bytes, line, millis, number, when } from "../text";
import { Badge, Button, Empty, Loaded, Panel, Table } from "../ui/parts";
import { Rich } from "../ui/rich";
import { MOST_BYTES, readReport, reportOf, type Report, type Times } from "./report-data";

const MOST_REPORTS = 8;

export function Reports() {
  const [reports, setReports] = useState<Report[]>([]);
  const files = useRef<HTMLInputElement>(null);
  const directory = useRef<HTMLInputElement>(null);
  const add = (read: Report[]) => setReports((before) => [...before, ...read].slice(-MOST_REPORTS).sort((a, b) => a.started - b.started));
  const close = (file: string) => setReports((before) => before.filter((one) => one.file !== file));
  const open = async (list: FileList | null) => {
    const chosen = [...(list ?? [])].filter((file) => file.name === "report.json" || list?.length === 1);
    if (chosen.length === 0) throw new Error(t.reports.noReport);
    const read = await Promise.all(
      chosen.slice(0, MOST_REPORTS).map(async (file) => {
        if (file.size > MOST_BYTES) throw new Error(t.reports.tooLarge(line(file.name, 80)));
        return readReport(file.webkitRelativePath || file.name, await file.text());
      }),
    );
    add(read);
  };
  const taken = (event: Event) => {
    const input = event.currentTarget as HTMLInputElement;
    void open(input.files)
      .catch((error: unknown) => notify("bad", error instanceof Error ? error.message : String(error)))
      .finally(() => (input.value = ""));
  };
  return (
    <>
      <div class="head">
        <h1>{t.app.reports}</h1>
        <Button onClick={() => files.current?.click()}>{t.reports.open}</Button>
        <Button kind="main" onClick={() => directory.current?.click()}>
          {t.reports.openDirectory}
        </Button>
        {reports.length > 0 && <Button onClick={() => setReports([])}>{t.reports.closeAll}</Button>}
      </div>
      <input ref={files} type="file" accept=".json" multiple hidden aria-label={t.reports.files} onChange={taken} />
      <input ref={directory} type="file" hidden aria-label={t.reports.directory} onChange={taken} {...({ webkitdirectory: true } as object)} />
      <OfServer opened={reports.map((report) => report.file)} add={add} close={close} />
      {reports.length === 0 ? (
        <Panel title={t.reports.runs}>
          <Empty title={t.reports.none}>
            <Rich text={t.reports.noneText} />
          </Empty>
        </Panel>
      ) : (
        <Comparison reports={reports} />
      )}
    </>
  );
}

/** The runs in the directory of `server.reports`. Nothing if there are none, or the key may not see them. */
function OfServer({ opened, add, close }: { opened: string[]; add: (read: Report[]) => void; close: (file: string) => void }) {
  const live = useLive(
    (signal) =>
      get<BenchmarkRun[]>("/benchmarks", signal).catch((error: unknown) => {
        // A key without the scope, or a server without the route.
        if (error instanceof ApiError && (error.status === 403 || error.status === 404)) return [];
        throw error;
      }),
    10_000,
  );
  if (live.data?.length === 0) return null;
  const load = async (name: string) => add([reportOf(name, await get<unknown>(at`/benchmarks/${name}`))]);
  return (
    <Panel title={t.reports.onServer}>
      <Loaded live={live}>
        {(runs) => (
          <Table label={t.reports.onServer} head={[t.common.name, t.reports.written, `#${t.common.size}`, ""]}>
            {runs.map(({ name, modifiedAt, bytes: size }) => {
              const isOpen = opened.includes(line(name, 120));
              return (
                <tr key={name}>
                  <td>{line(name, 128)}</td>
                  <td class="nowrap">{when(modifiedAt)}</td>
                  <td class="num">{bytes(size)}</td>
                  <td>
                    <Button onClick={() => (isOpen ? close(line(name, 120)) : load(name))} pressed={isOpen} label={t.reports.compareOf(line(name, 128))}>
                      {t.reports.compare}
                    </Button>
                  </td>
                </tr>
              );
            })}
          </Table>
        )}
      </Loaded>
    </Panel>
  );
}

function Comparison({ reports }: { reports: Report[] }) {
  const names = [...new Set(reports.flatMap((report) => report.phases.map(([name]) => name)))];
  const first = reports[0];
  return (
    <>
      <Panel title={t.reports.runs}>
        <Table label={t.reports.runs} head={[t.reports.run, t.reports.started, t.reports.host, t.reports.ended, t.reports.gates, t.reports.commit]}>
          {reports.map((report, at) => (
            <tr key={at}>
              <td>
                <strong>{report.scenario}</strong>
                <span class="guest muted">{report.file}</span>
              </td>
              <td class="nowrap">{when(new Date(report.started).toISOString())}</td>
              <td>
                <Badge tone={report.grade === "publishable" ? "good" : report.grade === "unfit" ? "bad" : "warn"}>{report.grade || t.reports.unknown}</Badge>
              </td>
              <td>{report.ended}</td>
              <td>{report.gates.missed ? <Badge tone="bad">{t.reports.missed(report.gates.missed)}</Badge> : <span>{t.reports.met(report.gates.met)}</span>}</td>
              <td class="mono">{report.commit || "–"}</td>
            </tr>
          ))}
        </Table>
      </Panel>
      {names.map((name) => (
        <Panel key={name} title={name}>
          <Table label={t.reports.timesOf(name)} head={[t.reports.run, "#n", `#${t.reports.failed}`, "#P50", "#P95", "#P99", `#${t.reports.toFirst}`]}>
            {reports.map((report, at) => {
              const times = report.phases.find(([phase]) => phase === name)?.[1];
              const base = first?.phases.find(([phase]) => phase === name)?.[1];
              return <Row key={at} report={report} times={times} base={at === 0 ? undefined : base} />;
            })}
          </Table>
        </Panel>
      ))}
    </>
  );
}

function Row({ report, times, base }: { report: Report; times: Times | undefined; base: Times | undefined }) {
  const ms = (value: number | null | undefined) => (typeof value === "number" ? millis(value / 1000) : t.overview.unknown);
  const ratio = times?.p50_ms && base?.p50_ms ? times.p50_ms / base.p50_ms : undefined;
  return (
    <tr>
      <td>{report.scenario}</td>
      <td class="num">{times?.n ?? "–"}</td>
      <td class="num">{times?.failed ?? "–"}</td>
      <td class="num">{ms(times?.p50_ms)}</td>
      <td class="num">{ms(times?.p95_ms)}</td>
      <td class="num">{ms(times?.p99_ms)}</td>
      <td class={`num ${ratio === undefined ? "" : ratio > 1.05 ? "worse" : ratio < 0.95 ? "better" : ""}`}>{ratio === undefined ? "–" : `× ${number(ratio, 2)}`}</td>
    </tr>
  );
}
