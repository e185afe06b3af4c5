// One file of a sandbox: a picture or text, and small text can be changed.
import { useState } from "preact/hooks";
import { download, encode, upload, type Entry, type Guest } from "../envd";
import { t } from "../i18n";
import { useLive } from "../live";
import { notify } from "../session";
import { bytes, clean, line } from "../text";
import { Button, Dialog, Empty, Loaded } from "../ui/parts";

export const MOST_SHOWN = 4 << 20;
const MOST_EDITED = 256 << 10;
/** First bytes of the pictures that browsers draw without running anything. */
const PICTURES: [string, string][] = [
  ["png", "\x89PNG"],
  ["jpeg", "\xff\xd8\xff"],
  ["gif", "GIF8"],
  ["webp", "RIFF"],
];

type Content = { kind: "picture"; type: string; base64: string } | { kind: "text"; text: string } | { kind: "other" };

async function read(guest: Guest, { path }: Entry, user: string, signal: AbortSignal): Promise<Content> {
  // It may have grown since it was listed.
  const limit = (done: number) => {
    if (done > MOST_SHOWN) throw new Error(t.errors.tooLong);
  };
  const content = new Uint8Array(await (await download(guest, path, user, limit, signal)).arrayBuffer());
  const start = String.fromCharCode(...content.subarray(0, 4));
  const picture = PICTURES.find(([, first]) => start.startsWith(first));
  if (picture) return { kind: "picture", type: picture[0], base64: encode(content) };
  try {
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(content);
    return text.includes("\0") ? { kind: "other" } : { kind: "text", text };
  } catch {
    return { kind: "other" };
  }
}

interface Props {
  guest: Guest;
  entry: Entry;
  user: string;
  take: () => unknown;
  onClose: () => void;
  done: () => void;
}

export function View({ guest, entry, user, take, onClose, done }: Props) {
  const live = useLive((signal) => read(guest, entry, user, signal), 0, [entry.path]);
  const [draft, setDraft] = useState<string>();
  const before = live.data?.kind === "text" ? live.data.text : undefined;
  const save = async () => {
    if (draft === undefined || before === undefined) return;
    const signal = AbortSignal.timeout(60_000);
    const now = await read(guest, entry, user, signal);
    if (now.kind !== "text" || now.text !== before) throw new Error(t.files.changedMeanwhile);
    await upload(guest, entry.path, user, new File([draft], "file"), () => undefined, signal);
    notify("good", t.files.saved(line(entry.name, 80)));
    onClose();
    done();
  };
  // A text field would show some characters as they are, and makes every line end a line feed.
  const isEditable = before !== undefined && before.length <= MOST_EDITED && clean(before, MOST_EDITED) === before;
  return (
    <Dialog
      title={line(entry.name, 120)}
      isWide
      leave={draft === undefined ? t.common.close : t.common.cancel}
      onClose={onClose}
      action={
        <>
          <Button onClick={take}>{t.files.download}</Button>
          {isEditable && draft === undefined && <Button onClick={() => setDraft(before)}>{t.common.edit}</Button>}
          {draft !== undefined && (
            <Button kind="main" onClick={save} disabled={draft === before}>
              {t.common.save}
            </Button>
          )}
        </>
      }
    >
      <p class="guest muted mono">{`${line(entry.path, 300)} · ${bytes(entry.size)}`}</p>
      <Loaded live={live}>
        {(content) => {
          if (draft !== undefined) return <textarea class="file-text" aria-label={t.files.content} spellcheck={false} value={draft} onInput={(event) => setDraft(event.currentTarget.value)} />;
          if (content.kind === "picture") return <img class="cell-image" alt={line(entry.name, 120)} src={`data:image/${content.type};base64,${content.base64}`} />;
          if (content.kind === "other") return <Empty title={t.files.binary} />;
          return (
            <pre class="file-text guest" tabIndex={0} aria-label={t.files.content}>
              {clean(content.text, MOST_EDITED)}
            </pre>
          );
        }}
      </Loaded>
    </Dialog>
  );
}
