import { useState } from "preact/hooks";
import { at, get, post, type BuildInfo, type LogEntry, type Template, type TemplateBuild } from "../api";
import { t } from "../i18n";
import { useLive } from "../live";
import { arrival, link } from "../session";
import { line, span } from "../text";
import { Button, Choice, Empty, Field, Loaded, Panel, StateBadge } from "../ui/parts";
import { Rich } from "../ui/rich";
import { Lines } from "../sandbox/logs";
import { readDockerfile } from "./dockerfile";
import { nameOf } from "./names";

/** Builds without a registry and without the internet, if the server has installed templates. */
const example = (base: string) => `FROM ${base}\nENV GREETING=hello\nWORKDIR /home/user/app\nRUN echo "$GREETING from the build" > greeting.txt\n`;
const IMAGE = "debian:12";

export function BuildForm() {
  const [name, setName] = useState("");
  const [source, setSource] = useState("dockerfile");
  const [typed, setTyped] = useState<string>();
  const [image, setImage] = useState("");
  const [start, setStart] = useState("");
  const [ready, setReady] = useState("");
  const [cpus, setCpus] = useState("1");
  const [memory, setMemory] = useState("512");
  const templates = useLive((signal) => get<Template[]>("/templates", signal), 0);
  const installed = (templates.data ?? []).filter((one) => one.installed).map(nameOf);
  const dockerfile = typed ?? (templates.data || templates.error ? example(installed.includes("base") ? "base" : (installed[0] ?? IMAGE)) : "");
  const build = async () => {
    const arrive = arrival();
    const read = source === "dockerfile" ? readDockerfile(dockerfile) : undefined;
    const from = read?.image ?? image.trim();
    const isTemplate = source === "template" || (source === "dockerfile" && installed.includes(from));
    const origin = isTemplate ? { fromTemplate: from } : { fromImage: from };
    const made = await post<{ templateID: string; buildID: string }>("/v3/templates", { name: name.trim(), cpuCount: Number(cpus), memoryMB: Number(memory) });
    await post(at`/v2/templates/${made.templateID}/builds/${made.buildID}`, {
      ...origin,
      steps: read?.steps ?? [],
      ...((start || read?.startCmd) && { startCmd: start || read?.startCmd }),
      ...(ready && { readyCmd: ready }),
    });
    arrive(t.build.building(name.trim()), "templates", made.templateID, made.buildID);
  };
  return (
    <>
      <div class="head">
        <h1>{t.templates.build}</h1>
      </div>
      <Panel title={t.build.what}>
        <div class="pad form">
          <div class="form two">
            <Field label={t.common.name} value={name} onInput={setName} placeholder={t.sandbox.nameForm} />
            <Choice
              label={t.build.begins}
              value={source}
              onInput={setSource}
              options={Object.entries(t.build.sources)}
            />
          </div>
          {source === "dockerfile" ? (
            <div class="field">
              <label for="dockerfile">Dockerfile</label>
              <textarea id="dockerfile" rows={9} spellcheck={false} value={dockerfile} onInput={(event) => setTyped(event.currentTarget.value)} />
              <p class="hint">
                <Rich text={t.build.dockerfileHint(line(installed.join(", "), 200))} />
              </p>
            </div>
          ) : (
            <Field label={source === "image" ? t.build.image : t.build.template} value={image} onInput={setImage} placeholder={source === "image" ? IMAGE : "base"} />
          )}
          <div class="form two">
            <Field label={t.build.startCommand} value={start} onInput={setStart} />
            <Field label={t.build.readyCommand} value={ready} onInput={setReady} />
            <Field label="vCPUs" type="number" min="1" value={cpus} onInput={setCpus} />
            <Field label={t.build.memory} type="number" min="128" step="64" value={memory} onInput={setMemory} />
          </div>
          <div class="tools">
            <Button kind="main" onClick={build} disabled={!name.trim() || (source !== "dockerfile" && !image.trim())}>
              {t.build.build}
            </Button>
          </div>
        </div>
      </Panel>
    </>
  );
}

/** Lines of a build's log that are kept. */
const MOST_LINES = 2000;

function useBuild(template: string, build: string) {
  const [lines] = useState<LogEntry[]>([]);
  return useLive(
    async (signal) => {
      let info: BuildInfo;
      do {
        info = await get<BuildInfo>(at`/templates/${template}/builds/${build}/status` + `?logsOffset=${lines.length}&limit=100`, signal);
        lines.push(...info.logEntries);
      } while (info.logEntries.length === 100 && lines.length < MOST_LINES);
      const whole = await get<{ names: string[]; aliases: string[]; builds: TemplateBuild[] }>(at`/templates/${template}`, signal).catch(() => undefined);
      return { status: info.status, reason: info.reason, lines: [...lines], whole };
    },
    1000,
    [template, build],
  );
}

type LiveBuild = ReturnType<typeof useBuild>;

function Log({ live, title }: { live: LiveBuild; title: string }) {
  return (
    <>
      {live.data?.reason && (
        <div class="failure" role="alert">
          <p class="guest">{line(live.data.reason.message, 1000)}</p>
        </div>
      )}
      <Panel title={title} tools={live.data && <StateBadge state={live.data.status} />}>
        <Loaded live={live}>{(data) => (data.lines.length ? <Lines entries={data.lines} tall /> : <Empty title={t.build.noLines} />)}</Loaded>
      </Panel>
    </>
  );
}

function titleOf(live: LiveBuild, template: string): string {
  const { whole } = live.data ?? {};
  const name = whole ? nameOf({ ...whole, templateID: template }) : "";
  return name ? t.build.of(line(name.split(":")[0], 80)) : t.build.build;
}

/** The log of a build, as it comes. */
export function BuildPanel({ template, build }: { template: string; build: string }) {
  const live = useBuild(template, build);
  return <Log live={live} title={titleOf(live, template)} />;
}

export function BuildLog({ template, build }: { template: string; build: string }) {
  const live = useBuild(template, build);
  const own = live.data?.whole?.builds.find((one) => one.buildID === build);
  return (
    <>
      <div class="head">
        <h1>{titleOf(live, template)}</h1>
        {own && <span class="muted">{own.finishedAt ? t.build.took(span(own.createdAt, new Date(own.finishedAt).getTime())) : t.build.runs(span(own.createdAt))}</span>}
        {live.data && <StateBadge state={live.data.status} />}
        <a class="button" href={link("templates", template)}>
          {t.build.template}
        </a>
        <p class="sub mono">{line(build, 60)}</p>
      </div>
      <Log live={live} title={t.build.log} />
    </>
  );
}
