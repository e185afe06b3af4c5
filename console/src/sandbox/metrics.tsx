import { useMemo } from "preact/hooks";
import { at, get, type Metric } from "../api";
import { useLive } from "../live";
import { bytes } from "../text";
import { Empty, Loaded, Panel } from "../ui/parts";
import { Series } from "../ui/series";

export function Metrics({ id }: { id: string }) {
  const live = useLive((signal) => get<Metric[]>(at`/sandboxes/${id}/metrics`, signal), 5000, [id]);
  return (
    <Panel title="Use" tools={<span class="muted">sampled on the host every 5 s</span>}>
      <Loaded live={live}>{(samples) => (samples.length < 2 ? <Empty title="No samples yet">The first ones come within ten seconds.</Empty> : <Charts samples={samples} />)}</Loaded>
    </Panel>
  );
}

function Charts({ samples }: { samples: Metric[] }) {
  const shown = useMemo(() => {
    const line = (name: string, of: (sample: Metric) => number) => [{ name, values: samples.map(of) }];
    return {
      times: samples.map((sample) => sample.timestampUnix),
      cpu: line("CPU", (sample) => sample.cpuUsedPct),
      memory: line("memory", (sample) => sample.memUsed),
      disk: line("disk", (sample) => sample.diskUsed),
    };
  }, [samples]);
  return (
    <>
      <Series title="CPU" times={shown.times} lines={shown.cpu} show={(value) => `${value.toFixed(value < 10 ? 1 : 0)} %`} top={5} />
      <Series title="Private memory" times={shown.times} lines={shown.memory} show={bytes} top={1 << 20} isBinary />
      <Series title="Disk of its layer" times={shown.times} lines={shown.disk} show={bytes} top={1 << 20} isBinary />
    </>
  );
}
