import { useState } from "preact/hooks";
import { get } from "../api";
import { t } from "../i18n";
import { key, refusal } from "../session";
import { line } from "../text";
import { Field } from "../ui/parts";
import { Rich } from "../ui/rich";

export function SignIn() {
  const [typed, setTyped] = useState("");
  const submit = (event: Event) => {
    event.preventDefault();
    const given = typed.trim();
    if (!given) return;
    key.value = given;
    // A key that is not taken comes back here with the reason.
    get("/teams").catch(() => undefined);
  };
  return (
    <div class="panel sign-in">
      <form class="dialog-body" onSubmit={submit}>
        <h1>{t.signIn.title}</h1>
        <Field label={t.signIn.key} type="password" value={typed} onInput={setTyped} hint={t.signIn.hint} />
        {refusal.value && (
          <p class="failure" role="alert">
            {line(refusal.value)}
          </p>
        )}
        <button type="submit" class="main" disabled={!typed.trim()}>
          {t.signIn.open}
        </button>
        <p class="hint">
          <Rich text={t.signIn.make} />
        </p>
      </form>
    </div>
  );
}
