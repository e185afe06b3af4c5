import { useState } from "preact/hooks";
import { ask, at, get, post, remove, type Tag, type Template, type TemplateBuild } from "../api";
import { useLive } from "../live";
import { arrival, go, link, notify, route } from "../session";
import { bytes, line, when } from "../text";
import { Badge, Button, Dialog, Empty, Field, Loaded, Panel, StateBadge, Table } from "../ui/parts";
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
        <h1>Templates</h1>
        <Button kind="main" onClick={() => go("templates", "new")}>
          Build a template
        </Button>
      </div>
      <Panel title="All templates">
        <Loaded live={live}>
          {(all) =>
            all.length === 0 ? (
              <Empty title="No templates">
                Build one from an image, or install those of this project: <code>cargo xtask prepare</code>.
              </Empty>
            ) : (
              <Table label="Templates" head={["Name", "Build", "Size", "#On disk", "#Starts", "#Builds", "Updated"]}>
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
                        {one.installed && <Badge tone="calm">installed</Badge>}
                      </div>
                    </td>
                    <td>
                      <StateBadge state={one.buildStatus} />
                    </td>
                    <td class="nowrap">
                      {one.cpuCount} vCPU, {one.memoryMB} MiB
                      {one.diskSizeMB > 0 && `, disk ${one.diskSizeMB} MiB`}
                    </td>
                    <td class="num">{bytes(one.storedBytes)}</td>
                    <td class="num">{one.spawnCount}</td>
                    <td class="num">{one.buildCount}</td>
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
    arrive(`Building ${name} again.`, "templates", made.templateID, made.buildID);
  };
  return (
    <>
      <div class="head">
        <h1>{line(name, 120)}</h1>
        {isInstalled && <Badge tone="calm">installed</Badge>}
        {live.data && live.data.names.length > 0 && <Button onClick={() => setIsNew(true)}>Start a sandbox</Button>}
        {live.data && !isInstalled && <Button onClick={again}>Build again</Button>}
        {live.data && !isInstalled && (
          <Button kind="danger" onClick={() => setGone(true)}>
            Delete
          </Button>
        )}
        <p class="sub mono">{line(id, 60)}</p>
      </div>
      <Loaded live={live}>
        {({ builds, tags }) => (
          <>
            <Tags name={name} tags={tags} reload={live.reload} />
            <Panel title="Builds">
              {builds.length === 0 ? (
                <Empty title="No builds">{isInstalled ? "The operator of this server installed this template. It can be used, and not changed, here." : "No build was started."}</Empty>
              ) : (
                <Table label="Builds" head={["Build", "State", "Size", "Begun", "Ended"]}>
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
                        {build.cpuCount} vCPU, {build.memoryMB} MiB
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
        <Dialog
          title={`Delete ${line(name, 60)}?`}
          onClose={() => setGone(false)}
          action={
            <Button
              kind="danger"
              onClick={async () => {
                const arrive = arrival();
                await remove(at`/templates/${id}`);
                arrive(`${name} was deleted.`, "templates");
              }}
            >
              Delete
            </Button>
          }
        >
          <p>Removes all of its builds and tags. Running sandboxes keep running.</p>
        </Dialog>
      )}
    </>
  );
}

function Tags({ name, tags, reload }: { name: string; tags: Tag[]; reload: () => void }) {
  const [tag, setTag] = useState("");
  const assign = async () => {
    await post("/templates/tags", { target: name, tags: [tag.trim()] });
    notify("good", `${name}:${tag.trim()} names the build of ${name}.`);
    setTag("");
    reload();
  };
  return (
    <Panel title="Tags">
      {tags.length === 0 ? (
        <Empty title="No tags" />
      ) : (
        <Table label="Tags" head={["Tag", "Build", "Since", ""]}>
          {tags.map((one) => (
            <tr key={one.tag}>
              <td>
                <span class="guest">{line(one.tag, 128)}</span>
              </td>
              <td class="id">{one.buildID.slice(0, 13)}…</td>
              <td class="nowrap">{when(one.createdAt)}</td>
              <td>
                {one.tag !== "default" && (
                  <Button
                    kind="danger"
                    label={`Remove the tag ${line(one.tag, 60)}`}
                    onClick={async () => {
                      await ask("DELETE", "/templates/tags", { name, tags: [one.tag] });
                      reload();
                    }}
                  >
                    Remove
                  </Button>
                )}
              </td>
            </tr>
          ))}
        </Table>
      )}
      <div class="filters">
        <Field label="New tag" value={tag} onInput={setTag} />
        <Button onClick={assign} disabled={!tag.trim()}>
          Assign
        </Button>
      </div>
    </Panel>
  );
}
