import { useMemo } from "preact/hooks";
import { at, get, type Metric } from "../api";
import { t } from "../i18n";
import { language } from "../i18n/language";
import { useLive } from "../live";
import { bytes, percent } from "../text";
import { Empty, Loaded, Panel } from "../ui/parts";
import { Series } from "../ui/series";

export function Metrics({ id }: { id: string }) {
  const live = useLive((signal) => get<Metric[]>(at`/sandboxes/${id}/metrics`, signal), 5000, [id]);
  return (
    <Panel title={t.metrics.title} tools={<span class="muted">{t.metrics.sampled}</span>}>
      <Loaded live={live}>{(samples) => (samples.length < 2 ? <Empty title={t.metrics.none}>{t.metrics.noneText}</Empty> : <Charts samples={samples} />)}</Loaded>
    </Panel>
  );
}

function Charts({ samples }: { samples: Metric[] }) {
  const shown = useMemo(() => {
    const line = (name: string, of: (sample: Metric) => number) => [{ name, values: samples.map(of) }];
    return {
      times: samples.map((sample) => sample.timestampUnix),
      cpu: line("CPU", (sample) => sample.cpuUsedPct),
      memory: line(t.metrics.memoryLine, (sample) => sample.memUsed),
      disk: line(t.metrics.diskLine, (sample) => sample.diskUsed),
    };
  }, [samples, language.value]);
  return (
    <>
      <Series title="CPU" times={shown.times} lines={shown.cpu} show={(value) => percent(value / 100, value < 10 ? 1 : 0)} top={5} />
      <Series title={t.metrics.memory} times={shown.times} lines={shown.memory} show={bytes} top={1 << 20} isBinary />
      <Series title={t.metrics.disk} times={shown.times} lines={shown.disk} show={bytes} top={1 << 20} isBinary />
    </>
  );
}
