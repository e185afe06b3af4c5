import { useState } from "preact/hooks";
import { ask, at, get, post, remove, type Tag, type Template, type TemplateBuild } from "../api";
import { t } from "../i18n";
import { useLive } from "../live";
import { arrival, go, link, notify, route } from "../session";
import { bytes, line, mebibytes, number, when } from "../text";
import { Badge, Button, Confirm, Dialog, Empty, Field, Loaded, Panel, StateBadge, Table } from "../ui/parts";
import { Rich } from "../ui/rich";
import { BuildForm, BuildLog } from "./build";
import { nameOf } from "./names";
import { NewSandbox } from "./new-sandbox";

export function Templates() {
  const [, id, build] = route.value;
  if (id === "new") return <BuildForm />;
  if (id && build) return <BuildLog template={id} build={build} />;
  if (id) return <One key={id} id={id} />;
  return <List />;
}

function List() {
  const live = useLive((signal) => get<Template[]>("/templates", signal), 5000);
  return (
    <>
      <div class="head">
        <h1>{t.app.templates}</h1>
        <Button kind="main" onClick={() => go("templates", "new")}>
          {t.templates.build}
        </Button>
      </div>
      <Panel title={t.templates.all}>
        <Loaded live={live}>
          {(all) =>
            all.length === 0 ? (
              <Empty title={t.templates.none}>
                <Rich text={t.templates.noneText} />
              </Empty>
            ) : (
              <Table label={t.app.templates} head={[t.common.name, t.templates.buildState, t.common.size, `#${t.templates.onDisk}`, `#${t.templates.starts}`, `#${t.templates.builds}`, t.templates.updated]}>
                {all.map((one) => (
                  <tr key={one.templateID}>
                    <td>
                      <div class="tools">
                        <a href={link("templates", one.templateID)}>
                          <span class="guest name">{line(nameOf(one), 160)}</span>
                        </a>
                        {one.names.length > 1 && (
                          <span class="muted" title={line(one.names.join(", "), 2000)}>
                            +{one.names.length - 1}
                          </span>
                        )}
                        {one.installed && <Badge tone="calm">{t.templates.installed}</Badge>}
                      </div>
                    </td>
                    <td>
                      <StateBadge state={one.buildStatus} />
                    </td>
                    <td class="nowrap">
                      {t.common.machine(one.cpuCount, mebibytes(one.memoryMB), one.diskSizeMB > 0 ? mebibytes(one.diskSizeMB) : "")}
                    </td>
                    <td class="num">{bytes(one.storedBytes)}</td>
                    <td class="num">{number(one.spawnCount)}</td>
                    <td class="num">{number(one.buildCount)}</td>
                    <td class="nowrap">{when(one.updatedAt)}</td>
                  </tr>
                ))}
              </Table>
            )
          }
        </Loaded>
      </Panel>
    </>
  );
}

interface Whole {
  names: string[];
  aliases: string[];
  builds: TemplateBuild[];
  tags: Tag[];
  installed?: boolean;
}

function One({ id }: { id: string }) {
  const [gone, setGone] = useState(false);
  const [isNew, setIsNew] = useState(false);
  const live = useLive(
    async (signal): Promise<Whole> => {
      const [whole, tags] = await Promise.all([
        get<Omit<Whole, "tags">>(at`/templates/${id}`, signal),
        get<Tag[]>(at`/templates/${id}/tags`, signal).catch(() => []),
      ]);
      return { ...whole, tags };
    },
    3000,
    [id],
  );
  const name = nameOf({ names: [], aliases: [], ...live.data, templateID: id }).split(":")[0] ?? id;
  const isInstalled = live.data?.installed === true;
  const again = async () => {
    const arrive = arrival();
    const made = await post<{ templateID: string; buildID: string }>(at`/templates/${id}/redo`, {});
    arrive(t.templates.buildingAgain(name), "templates", made.templateID, made.buildID);
  };
  return (
    <>
      <div class="head">
        <h1>{line(name, 120)}</h1>
        {isInstalled && <Badge tone="calm">{t.templates.installed}</Badge>}
        {live.data && live.data.names.length > 0 && <Button onClick={() => setIsNew(true)}>{t.templates.start}</Button>}
        {live.data && !isInstalled && <Button onClick={again}>{t.templates.again}</Button>}
        {live.data && !isInstalled && (
          <Button kind="danger" onClick={() => setGone(true)}>
            {t.common.delete}
          </Button>
        )}
        <p class="sub mono">{line(id, 60)}</p>
      </div>
      <Loaded live={live}>
        {({ builds, tags }) => (
          <>
            <Tags name={name} tags={tags} isFixed={isInstalled} reload={live.reload} />
            <Panel title={t.templates.builds}>
              {builds.length === 0 ? (
                <Empty title={t.templates.noBuilds}>{isInstalled ? t.templates.noBuildsInstalled : t.templates.noBuildsText}</Empty>
              ) : (
                <Table label={t.templates.builds} head={[t.templates.buildState, t.common.state, t.common.size, t.templates.begun, t.templates.ended]}>
                  {builds.map((build) => (
                    <tr key={build.buildID}>
                      <td>
                        <a class="id" href={link("templates", id, build.buildID)}>
                          {build.buildID.slice(0, 13)}…
                        </a>
                      </td>
                      <td>
                        <StateBadge state={build.status} />
                      </td>
                      <td class="nowrap">
                        {t.common.machine(build.cpuCount, mebibytes(build.memoryMB), "")}
                      </td>
                      <td class="nowrap">{when(build.createdAt)}</td>
                      <td class="nowrap">{when(build.finishedAt)}</td>
                    </tr>
                  ))}
                </Table>
              )}
            </Panel>
          </>
        )}
      </Loaded>
      {isNew && live.data && <NewSandbox from={live.data.names[0] ?? id} onClose={() => setIsNew(false)} />}
      {gone && (
        <Confirm
          title={t.templates.deleteAsk}
          name={name}
          text={t.templates.deleteText}
          onClose={() => setGone(false)}
          confirm={async () => {
            const arrive = arrival();
            await remove(at`/templates/${id}`);
            arrive(t.templates.deleted(name), "templates");
          }}
        />
      )}
    </>
  );
}

function Tags({ name, tags, isFixed, reload }: { name: string; tags: Tag[]; isFixed: boolean; reload: () => void }) {
  const [tag, setTag] = useState("");
  const [back, setBack] = useState<Tag>();
  const current = tags.find((one) => one.tag === "default")?.buildID;
  const assign = async () => {
    await post("/templates/tags", { target: name, tags: [tag.trim()] });
    notify("good", t.templates.tagged(name, tag.trim()));
    setTag("");
    reload();
  };
  return (
    <Panel title={t.templates.tags}>
      {tags.length === 0 ? (
        <Empty title={t.templates.noTags} />
      ) : (
        <Table label={t.templates.tags} head={[t.templates.tag, t.templates.buildState, t.templates.since, ""]}>
          {tags.map((one) => (
            <tr key={one.tag}>
              <td>
                <span class="guest">{line(one.tag, 128)}</span>
              </td>
              <td class="id">{one.buildID.slice(0, 13)}…</td>
              <td class="nowrap">{when(one.createdAt)}</td>
              <td>
                {!isFixed && one.tag !== "default" && one.buildID !== current && (
                  <Button onClick={() => setBack(one)} label={t.templates.rollBackTo(line(one.tag, 60))}>
                    {t.templates.rollBack}
                  </Button>
                )}
                {!isFixed && one.tag !== "default" && (
                  <Button
                    kind="danger"
                    label={t.templates.removeTag(line(one.tag, 60))}
                    onClick={async () => {
                      await ask("DELETE", "/templates/tags", { name, tags: [one.tag] });
                      reload();
                    }}
                  >
                    {t.common.remove}
                  </Button>
                )}
              </td>
            </tr>
          ))}
        </Table>
      )}
      {!isFixed && (
        <div class="filters">
          <Field label={t.templates.newTag} value={tag} onInput={setTag} />
          <Button onClick={assign} disabled={!tag.trim()}>
            {t.templates.assign}
          </Button>
        </div>
      )}
      {back && <RollBack name={name} to={back} onClose={() => setBack(undefined)} reload={reload} />}
    </Panel>
  );
}

/** Makes a tagged build the one that the plain name means. A build without any tag is lost, so the present one can get one. */
function RollBack({ name, to, onClose, reload }: { name: string; to: Tag; onClose: () => void; reload: () => void }) {
  const [keep, setKeep] = useState(`before-${new Date().toISOString().slice(0, 10)}`);
  const move = async () => {
    if (keep.trim()) await post("/templates/tags", { target: name, tags: [keep.trim()] });
    await post("/templates/tags", { target: `${name}:${to.tag}`, tags: ["default"] });
    notify("good", t.templates.rolledBack(name, line(to.tag, 80)));
    onClose();
    reload();
  };
  return (
    <Dialog
      title={t.templates.rollBackTo(line(to.tag, 60))}
      onClose={onClose}
      action={
        <Button kind="main" onClick={move}>
          {t.templates.rollBack}
        </Button>
      }
    >
      <p>{t.templates.rollBackText(line(name, 80), line(to.tag, 80))}</p>
      <Field label={t.templates.keepAs} value={keep} onInput={setKeep} hint={t.templates.keepHint} />
    </Dialog>
  );
}
