// Copying to the clipboard.
import { t } from "../i18n";
import { notify } from "../session";
import { Button } from "./parts";

/** Without TLS the browser offers the clipboard on loopback addresses only; elsewhere a selection is copied. */
export async function copyText(text: string): Promise<void> {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  const before = document.activeElement;
  area.value = text;
  area.className = "sr";
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  if (before instanceof HTMLElement) before.focus();
  if (!isCopied) throw new Error(t.errors.noCopy);
}

export function Copy({ text, what }: { text: string; what: string }) {
  const copy = async () => {
    await copyText(text);
    notify("good", t.common.copied(what));
  };
  return (
    <Button onClick={copy} label={t.common.copyOf(what)}>
      {t.common.copy}
    </Button>
  );
}
