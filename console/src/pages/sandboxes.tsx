import { useState } from "preact/hooks";
import { all, get, type LifecycleEvent, type Listed } from "../api";
import { t } from "../i18n";
import { useLive } from "../live";
import { link } from "../session";
import { line, mebibytes, span, when } from "../text";
import { Button, Choice, Empty, Field, Loaded, Panel, StateBadge, Table } from "../ui/parts";
import { Still } from "../ui/still";
import { EventTable, typeOf } from "./events";
import { NewSandbox } from "./new-sandbox";

export function Sandboxes() {
  const [search, setSearch] = useState("");
  const [state, setState] = useState("running,paused");
  const [isNew, setIsNew] = useState(false);
  const isEnded = state === "ended";
  const live = useLive(() => (isEnded ? Promise.resolve([]) : all<Listed>(`/v2/sandboxes?state=${state}`)), 3000, [state]);
  return (
    <>
      <div class="head">
        <h1>{t.app.sandboxes}</h1>
        <Button kind="main" onClick={() => setIsNew(true)}>
          {t.sandboxes.new}
        </Button>
      </div>
      <Panel title={t.sandboxes.all} tools={live.data && !isEnded && <span class="muted">{t.sandboxes.count(live.data.length)}</span>}>
        <div class="filters">
          <Field label={t.common.search} type="search" placeholder={t.sandboxes.searchIn} value={search} onInput={setSearch} />
          <Choice
            label={t.common.state}
            value={state}
            onInput={setState}
            options={[
              ["running,paused", t.sandboxes.both],
              ["running", t.sandboxes.running],
              ["paused", t.sandboxes.paused],
              ["ended", t.sandboxes.ended],
            ]}
          />
        </div>
        {isEnded ? <Ended search={search} /> : <Loaded live={live}>{(list) => <List list={list} search={search} create={() => setIsNew(true)} />}</Loaded>}
      </Panel>
      {isNew && <NewSandbox onClose={() => setIsNew(false)} />}
    </>
  );
}

/** Pages of 100 events that are read. */
const MOST_PAGES = 5;

/** Of the last days, by the events of their ends. */
async function loadEnded(signal: AbortSignal): Promise<LifecycleEvent[]> {
  const found: LifecycleEvent[] = [];
  for (let page = 0; page < MOST_PAGES && found.length === page * 100; page += 1) {
    found.push(...(await get<LifecycleEvent[]>(`/events/sandboxes?types=${typeOf("killed")}&limit=100&offset=${page * 100}`, signal)));
  }
  return found;
}

function Ended({ search }: { search: string }) {
  const live = useLive(loadEnded, 5000);
  return (
    <Loaded live={live}>
      {(events) => {
        const found = events.filter((one) => matches(search, [one.sandboxId, one.sandboxTemplateId, one.eventData.sandbox_metadata]));
        return found.length ? <EventTable events={found} /> : <Empty title={search ? t.sandboxes.noMatch(line(search, 60)) : t.sandboxes.noneEnded} />;
      }}
    </Loaded>
  );
}

function matches(search: string, values: unknown[]): boolean {
  return JSON.stringify(values).toLowerCase().includes(search.trim().toLowerCase());
}

function List({ list, search, create }: { list: Listed[]; search: string; create: () => void }) {
  const found = list.filter((one) => matches(search, [one.sandboxID, one.alias, one.templateID, one.metadata]));
  if (list.length === 0) {
    return (
      <Empty title={t.sandboxes.none}>
        {t.sandboxes.noneText}
        <div>
          <Button onClick={create}>{t.sandboxes.new}</Button>
        </div>
      </Empty>
    );
  }
  if (found.length === 0) return <Empty title={t.sandboxes.noMatch(line(search, 60))} />;
  return (
    <Still data={found} keyOf={(one) => one.sandboxID}>
      {(rows) => <Rows rows={rows} />}
    </Still>
  );
}

function Rows({ rows }: { rows: Listed[] }) {
  return (
    <Table label={t.app.sandboxes} head={[t.sandboxes.sandbox, t.common.state, t.sandboxes.template, t.sandboxes.started, t.sandboxes.endsIn, t.common.size, t.sandboxes.metadata]}>
      {rows.map((one) => (
        <tr key={one.sandboxID}>
          <td>
            <a class="id" href={link("sandboxes", one.sandboxID)}>
              {one.sandboxID}
            </a>
          </td>
          <td>
            <StateBadge state={one.state} />
          </td>
          <td>
            <span class="guest">{line(one.alias ?? one.templateID, 80)}</span>
          </td>
          <td class="nowrap" title={when(one.startedAt)}>
            {t.sandboxes.ago(span(one.startedAt))}
          </td>
          <td class="nowrap">{one.state === "running" ? span(one.endAt) : "–"}</td>
          <td class="nowrap">
            {t.common.machine(one.cpuCount, mebibytes(one.memoryMB), "")}
          </td>
          <td>
            <span class="guest muted">
              {Object.entries(one.metadata ?? {})
                .map(([name, value]) => `${line(name, 40)}=${line(value, 60)}`)
                .join(" ")}
            </span>
          </td>
        </tr>
      ))}
    </Table>
  );
}
