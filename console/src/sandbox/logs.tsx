import { useEffect, useRef, useState } from "preact/hooks";
import { at, get, type LogEntry } from "../api";
import { named, t } from "../i18n";
import { useLive } from "../live";
import { clock, output } from "../text";
import { Empty, Field, Loaded, Panel } from "../ui/parts";

export function Logs({ id }: { id: string }) {
  const [search, setSearch] = useState("");
  const query = `?direction=backward&limit=500&search=${encodeURIComponent(search)}`;
  const live = useLive(async (signal) => (await get<{ logs: LogEntry[] }>(at`/v2/sandboxes/${id}/logs` + query, signal)).logs.reverse(), 2000, [id, search]);
  return (
    <Panel title={t.logs.title} tools={<span class="muted">{t.logs.what}</span>}>
      <div class="filters">
        <Field label={t.common.search} type="search" value={search} onInput={setSearch} />
      </div>
      <Loaded live={live}>{(entries) => (entries.length ? <Lines entries={entries} tall /> : <Empty title={search ? t.logs.noMatch : t.logs.none} />)}</Loaded>
    </Panel>
  );
}

/** Lines of a log. The list follows its end while the reader is there. */
export function Lines({ entries, tall = false }: { entries: LogEntry[]; tall?: boolean }) {
  const box = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  useEffect(() => {
    const element = box.current;
    if (element && follows.current) element.scrollTop = element.scrollHeight;
  }, [entries]);
  const scrolled = () => {
    const element = box.current;
    if (element) follows.current = element.scrollHeight - element.scrollTop - element.clientHeight < 40;
  };
  return (
    <div ref={box} class={tall ? "log tall" : "log"} role="log" aria-label={t.logs.lines} aria-live="off" tabIndex={0} onScroll={scrolled}>
      {entries.map((entry, at) => (
        <div key={at} class={["warn", "error"].includes(entry.level) ? entry.level : ""}>
          <time>{clock(entry.timestamp)}</time>
          <span class="level">{named(t.logs.levels, entry.level)}</span>
          <span class="guest">{output(entry.message, 4000)}</span>
        </div>
      ))}
    </div>
  );
}
