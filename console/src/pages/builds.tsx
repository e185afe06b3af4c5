// Builds of all templates, with the log of one.
import { useState } from "preact/hooks";
import { at, get, type Template, type TemplateBuild } from "../api";
import { named, t } from "../i18n";
import { useLive } from "../live";
import { link, route } from "../session";
import { line, span, when } from "../text";
import { Choice, Empty, Loaded, Panel, StateBadge, Table } from "../ui/parts";
import { BuildPanel } from "./build";
import { nameOf } from "./names";

const MOST_TEMPLATES = 50;
const STATES = ["building", "waiting", "ready", "error"];

interface Row extends TemplateBuild {
  template: Template;
}

/** Builds of a template as they were when it had this stamp. */
const known = new Map<string, { stamp: string; builds: TemplateBuild[] }>();

async function load(signal: AbortSignal): Promise<Row[]> {
  const templates = (await get<Template[]>("/templates", signal)).filter((one) => !one.installed && one.buildCount > 0);
  const latest = templates.sort((a, b) => b.updatedAt.localeCompare(a.updatedAt)).slice(0, MOST_TEMPLATES);
  const rows = latest.map(async (template): Promise<Row[]> => {
    const stamp = [template.updatedAt, template.buildStatus, template.buildID, template.buildCount].join();
    let of = known.get(template.templateID);
    if (of?.stamp !== stamp || of.builds.some((build) => !build.finishedAt)) {
      of = { stamp, builds: (await get<{ builds: TemplateBuild[] }>(at`/templates/${template.templateID}`, signal)).builds };
      known.set(template.templateID, of);
    }
    return of.builds.map((build) => ({ ...build, template }));
  });
  return (await Promise.all(rows)).flat().sort((a, b) => b.createdAt.localeCompare(a.createdAt));
}

export function Builds() {
  const live = useLive(load, 2000);
  const [state, setState] = useState("");
  const [, template, build] = route.value;
  const latest = live.data?.[0];
  const shown = template && build ? { template, build } : latest && { template: latest.template.templateID, build: latest.buildID };
  return (
    <>
      <div class="head">
        <h1>{t.app.builds}</h1>
        <a class="button" href={link("templates", "new")}>
          {t.templates.build}
        </a>
      </div>
      <Panel title={t.builds.all}>
        <div class="filters">
          <Choice label={t.common.state} value={state} onInput={setState} options={[["", t.events.all], ...STATES.map((one) => [one, named(t.states, one) ?? one] as const)]} />
        </div>
        <Loaded live={live}>
          {(all) => {
            const rows = all.filter((one) => !state || one.status === state);
            if (rows.length === 0) return <Empty title={t.templates.noBuilds} />;
            return (
              <div class="short">
                <Table label={t.app.builds} head={[t.create.template, t.templates.buildState, t.common.state, t.templates.begun, t.network.took]}>
                  {rows.map((one) => (
                    <tr key={one.buildID} class={one.buildID === shown?.build ? "chosen" : ""}>
                      <td>
                        <a href={link("templates", one.template.templateID)}>
                          <span class="guest name">{line(nameOf(one.template).split(":")[0], 80)}</span>
                        </a>
                      </td>
                      <td>
                        <a class="id" href={link("builds", one.template.templateID, one.buildID)} aria-current={one.buildID === shown?.build ? "true" : undefined}>
                          {one.buildID.slice(0, 13)}…
                        </a>
                      </td>
                      <td>
                        <StateBadge state={one.status} />
                      </td>
                      <td class="nowrap">{when(one.createdAt)}</td>
                      <td class="nowrap">{span(one.createdAt, one.finishedAt ? new Date(one.finishedAt).getTime() : undefined)}</td>
                    </tr>
                  ))}
                </Table>
              </div>
            );
          }}
        </Loaded>
      </Panel>
      {shown && <BuildPanel key={shown.build} {...shown} />}
    </>
  );
}
