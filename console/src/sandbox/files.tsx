import { useRef, useState } from "preact/hooks";
import { call, download, guestOf, list, upload, type Entry, type Guest } from "../envd";
import { t } from "../i18n";
import { useLive } from "../live";
import { notify } from "../session";
import { bytes, line, when } from "../text";
import { Button, Choice, Confirm, Dialog, Empty, Field, Loaded, Panel, Table } from "../ui/parts";
import { MOST_SHOWN, View } from "./view";

interface Transfer {
  name: string;
  done: number;
  total: number;
  stop: () => void;
}

export function Files({ id }: { id: string }) {
  const [path, setPath] = useState("/home/user");
  const [user, setUser] = useState("user");
  const [transfer, setTransfer] = useState<Transfer>();
  const [gone, setGone] = useState<Entry>();
  const [isNew, setIsNew] = useState(false);
  const [viewed, setViewed] = useState<Entry>();
  const [dropping, setDropping] = useState(false);
  const picker = useRef<HTMLInputElement>(null);
  const live = useLive(
    async () => {
      const guest = await guestOf(id);
      return { guest, entries: await list(guest, path, user) };
    },
    0,
    [id, path, user],
  );
  const moved = async (name: string, work: (progress: (done: number, total: number) => void, signal: AbortSignal) => Promise<unknown>) => {
    const abort = new AbortController();
    const stop = () => abort.abort();
    setTransfer({ name, done: 0, total: 0, stop });
    try {
      await work((done, total) => setTransfer({ name, done, total, stop }), abort.signal);
    } finally {
      setTransfer(undefined);
    }
  };
  const put = async (files: FileList | null | undefined) => {
    const guest = live.data?.guest;
    if (!guest) return;
    for (const file of [...(files ?? [])]) {
      await moved(file.name, (progress, signal) => upload(guest, inside(path, file.name), user, file, progress, signal));
      notify("good", t.files.uploaded(line(file.name, 80)));
    }
    live.reload();
  };
  const take = (guest: Guest, entry: Entry) =>
    moved(entry.name, async (progress, signal) => {
      const url = URL.createObjectURL(await download(guest, entry.path, user, progress, signal));
      const anchor = document.createElement("a");
      anchor.href = url;
      anchor.download = safeName(entry.name);
      anchor.click();
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
    });
  return (
    <Panel
      title={t.files.title}
      tools={
        <>
          <Button onClick={live.reload}>{t.common.reload}</Button>
          <Button onClick={() => setIsNew(true)}>{t.files.newDirectory}</Button>
          <Button kind="main" onClick={() => picker.current?.click()} disabled={!live.data}>
            {t.files.upload}
          </Button>
        </>
      }
    >
      <input
        ref={picker}
        type="file"
        multiple
        hidden
        aria-label={t.files.toUpload}
        onChange={(event) => {
          const input = event.currentTarget;
          void put(input.files)
            .catch((error: unknown) => notify("bad", String(error)))
            .finally(() => (input.value = ""));
        }}
      />
      <div class="filters">
        <Crumbs path={path} open={setPath} />
        <Choice
          label={t.files.asUser}
          value={user}
          onInput={setUser}
          options={[
            ["user", "user"],
            ["root", "root"],
          ]}
        />
      </div>
      {transfer && (
        <div class="progress" role="status">
          <span class="guest">{line(transfer.name, 60)}</span>
          <progress aria-label={t.files.part} {...(transfer.total ? { value: transfer.done, max: transfer.total } : {})} />
          <span class="num">{bytes(transfer.done)}</span>
          <Button onClick={transfer.stop}>{t.files.stop}</Button>
        </div>
      )}
      <div
        class={dropping ? "dropping" : ""}
        onDragOver={(event) => {
          event.preventDefault();
          setDropping(true);
        }}
        onDragLeave={() => setDropping(false)}
        onDrop={(event) => {
          event.preventDefault();
          setDropping(false);
          void put(event.dataTransfer?.files).catch((error: unknown) => notify("bad", String(error)));
        }}
      >
        <Loaded live={live}>
          {({ guest, entries }) =>
            entries.length === 0 ? <Empty title={t.files.empty}>{t.files.emptyText}</Empty> : <Entries entries={entries} open={setPath} view={setViewed} take={(entry) => take(guest, entry)} drop={setGone} />
          }
        </Loaded>
      </div>
      {gone && live.data && (
        <Confirm
          title={t.files.removeAsk}
          name={gone.path}
          verb={t.common.remove}
          onClose={() => setGone(undefined)}
          confirm={async () => {
            await call(live.data?.guest as Guest, "filesystem.Filesystem/Remove", { path: gone.path }, user);
            live.reload();
          }}
        />
      )}
      {viewed && live.data && <View guest={live.data.guest} entry={viewed} user={user} take={() => take(live.data?.guest as Guest, viewed)} onClose={() => setViewed(undefined)} done={live.reload} />}
      {isNew && live.data && <NewDirectory at={path} guest={live.data.guest} user={user} onClose={() => setIsNew(false)} done={live.reload} />}
    </Panel>
  );
}

function inside(dir: string, name: string): string {
  return `${dir.replace(/\/+$/, "")}/${name}`;
}

/** Windows takes these names, with any ending, for devices. */
const DEVICES = /^(con|prn|aux|nul|com\d|lpt\d)(\.|$)/i;

/** The name under which the browser stores a file: no path, not hidden, no device, with the ending of a long name. */
export function safeName(name: string): string {
  const [, stem = "", ending = ""] = /^(.*?)(\.[\w-]{1,16})?$/s.exec(line(name, 1000).replace(/[\\/:*?"<>|\u{fffd}…]/gu, "_").replace(/^\.+|[. ]+$/g, "_")) ?? [];
  return `${DEVICES.test(stem) ? "_" : ""}${stem.slice(0, 100)}${ending}` || "file";
}

function Crumbs({ path, open }: { path: string; open: (path: string) => void }) {
  const parts = path.split("/").filter(Boolean);
  return (
    <div class="field">
      <span class="label">{t.files.directory}</span>
      <div class="crumbs">
        <button type="button" aria-label={t.files.root} onClick={() => open("/")}>
          /
        </button>
        {parts.map((part, at) => (
          <button key={at} type="button" onClick={() => open(`/${parts.slice(0, at + 1).join("/")}`)}>
            {line(part, 40)}
            {at < parts.length - 1 && " /"}
          </button>
        ))}
      </div>
    </div>
  );
}

/** Rows that are drawn; a directory may have more entries than a page can hold. */
const MOST_ROWS = 1000;

interface EntriesProps {
  entries: Entry[];
  open: (path: string) => void;
  view: (entry: Entry) => void;
  take: (entry: Entry) => unknown;
  drop: (entry: Entry) => void;
}

function Entries({ entries, open, view, take, drop }: EntriesProps) {
  const isDirectory = (entry: Entry) => entry.type === "FILE_TYPE_DIRECTORY";
  const sorted = [...entries].sort((a, b) => Number(isDirectory(b)) - Number(isDirectory(a))).slice(0, MOST_ROWS);
  return (
    <>
      <Table label={t.files.entries} head={[t.common.name, `#${t.common.size}`, t.files.permissions, t.files.owner, t.files.modified, ""]}>
        {sorted.map((entry) => (
          <tr key={entry.path}>
            <td>
              {isDirectory(entry) ? (
                <button type="button" class="file" onClick={() => open(entry.path)}>
                  <span class="guest">{line(entry.name, 255)}/</span>
                </button>
              ) : entry.type === "FILE_TYPE_FILE" && entry.size <= MOST_SHOWN ? (
                <button type="button" class="file" onClick={() => view(entry)}>
                  <span class="guest">{line(entry.name, 255)}</span>
                </button>
              ) : (
                <span class="guest">{line(entry.name, 255)}</span>
              )}
              {entry.symlinkTarget && <span class="guest muted">→ {line(entry.symlinkTarget, 200)}</span>}
            </td>
            <td class="num">{isDirectory(entry) ? "–" : bytes(entry.size)}</td>
            <td class="mono nowrap">{line(entry.permissions, 16)}</td>
            <td>{line(entry.owner, 32)}</td>
            <td class="nowrap">{when(entry.modifiedTime)}</td>
            <td>
              <div class="tools">
                {entry.type === "FILE_TYPE_FILE" && (
                  <Button onClick={() => take(entry)} label={t.files.downloadOf(line(entry.name, 80))}>
                    {t.files.download}
                  </Button>
                )}
                <Button kind="danger" onClick={() => drop(entry)} label={t.files.removeOf(line(entry.name, 80))}>
                  {t.common.remove}
                </Button>
              </div>
            </td>
          </tr>
        ))}
      </Table>
      {entries.length > MOST_ROWS && <p class="pad muted">{t.files.notShown(entries.length - MOST_ROWS)}</p>}
    </>
  );
}

function NewDirectory({ at, guest, user, onClose, done }: { at: string; guest: Guest; user: string; onClose: () => void; done: () => void }) {
  const [name, setName] = useState("");
  const make = async () => {
    if (/^\.{0,2}$|\//.test(name)) throw new Error(t.files.badName);
    await call(guest, "filesystem.Filesystem/MakeDir", { path: inside(at, name) }, user);
    onClose();
    done();
  };
  return (
    <Dialog
      title={t.files.newDirectory}
      onClose={onClose}
      action={
        <Button kind="main" onClick={make} disabled={!name.trim()}>
          {t.files.make}
        </Button>
      }
    >
      <Field label={t.common.name} value={name} onInput={setName} />
    </Dialog>
  );
}
