import { useState } from "preact/hooks";
import { get } from "../api";
import { key, refusal } from "../session";
import { line } from "../text";
import { Field } from "../ui/parts";

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
        <h1>Sign in to this server</h1>
        <Field label="API key" type="password" value={typed} onInput={setTyped} hint="This tab keeps the key, also when you reload the page. “Forget key” or closing the tab removes it; other tabs do not get it." />
        {refusal.value && (
          <p class="failure" role="alert">
            {line(refusal.value)}
          </p>
        )}
        <button type="submit" class="main" disabled={!typed.trim()}>
          Open the console
        </button>
        <p class="hint">
          New key: <code>cube-api key new NAME --scope …</code>. With <code>metrics:read</code> the overview shows the server's figures.
        </p>
      </form>
    </div>
  );
}
