import { useState } from "preact/hooks";
import { all, type Listed } from "../api";
import { useLive } from "../live";
import { link } from "../session";
import { count, line, span, when } from "../text";
import { Button, Choice, Empty, Field, Loaded, Panel, StateBadge, Table } from "../ui/parts";
import { NewSandbox } from "./new-sandbox";

export function Sandboxes() {
  const [search, setSearch] = useState("");
  const [state, setState] = useState("running,paused");
  const [isNew, setIsNew] = useState(false);
  const live = useLive(() => all<Listed>(`/v2/sandboxes?state=${state}`), 3000, [state]);
  return (
    <>
      <div class="head">
        <h1>Sandboxes</h1>
        <Button kind="main" onClick={() => setIsNew(true)}>
          New sandbox
        </Button>
      </div>
      <Panel title="All sandboxes" tools={live.data && <span class="muted">{count(live.data.length, "sandbox", "sandboxes")}</span>}>
        <div class="filters">
          <Field label="Search" type="search" placeholder="id, template or metadata" value={search} onInput={setSearch} />
          <Choice
            label="State"
            value={state}
            onInput={setState}
            options={[
              ["running,paused", "Running and paused"],
              ["running", "Running"],
              ["paused", "Paused"],
            ]}
          />
        </div>
        <Loaded live={live}>{(list) => <List list={list} search={search} create={() => setIsNew(true)} />}</Loaded>
      </Panel>
      {isNew && <NewSandbox onClose={() => setIsNew(false)} />}
    </>
  );
}

function List({ list, search, create }: { list: Listed[]; search: string; create: () => void }) {
  const wanted = search.trim().toLowerCase();
  const found = list.filter((one) => !wanted || JSON.stringify([one.sandboxID, one.alias, one.templateID, one.metadata]).toLowerCase().includes(wanted));
  if (list.length === 0) {
    return (
      <Empty title="No sandboxes">
        A sandbox starts in milliseconds from a template.
        <div>
          <Button onClick={create}>New sandbox</Button>
        </div>
      </Empty>
    );
  }
  if (found.length === 0) return <Empty title={`Nothing matches “${line(search, 60)}”`} />;
  return (
    <Table label="Sandboxes" head={["Sandbox", "State", "Template", "Started", "Ends in", "Size", "Metadata"]}>
      {found.map((one) => (
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
            {span(one.startedAt)} ago
          </td>
          <td class="nowrap">{one.state === "running" ? span(one.endAt) : "–"}</td>
          <td class="nowrap">
            {one.cpuCount} vCPU, {one.memoryMB} MiB
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
