// The frame around every page: navigation, connection, theme, key.
import { effect, signal, untracked } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { get } from "./api";
import { forgetCells } from "./cells/cells";
import { t } from "./i18n";
import { choose, language, type Language } from "./i18n/language";
import { Builds } from "./pages/builds";
import { Events } from "./pages/events";
import { Keys } from "./pages/keys";
import { Nodes } from "./pages/nodes";
import { Overview } from "./pages/overview";
import { Reports } from "./pages/reports";
import { Sandboxes } from "./pages/sandboxes";
import { Secrets } from "./pages/secrets";
import { SignIn } from "./pages/sign-in";
import { Snapshots } from "./pages/snapshots";
import { Templates } from "./pages/templates";
import { Webhooks } from "./pages/webhooks";
import { SandboxPage } from "./sandbox/page";
import { leaveShells } from "./sandbox/shells";
import { access, dialogs, key, link, online, revival, route, signOut, theme, type Theme } from "./session";
import { Notices } from "./ui/notices";
import { listenForPalette, openPalette, Palette } from "./ui/palette";
import { Button } from "./ui/parts";

/** Whether the server is a node of a cluster. */
const hasNodes = signal(false);

const PAGES = ["overview", "sandboxes", "templates", "builds", "snapshots", "events", "webhooks", "secrets", "keys", "reports"] as const;

// A server without keys answers at once; any other one asks for a key.
function probe() {
  untracked(() => get("/teams")).catch(() => undefined);
}

effect(() => {
  if (access.value === "unknown" && revival.value >= 0) probe();
});
effect(() => {
  if (access.value !== "granted") return;
  untracked(() => get("/nodes")).then(
    () => (hasNodes.value = true),
    () => (hasNodes.value = false),
  );
});

export function App() {
  // While the server does not answer, its return is looked for here, not by each view.
  const isOnline = online.value;
  useEffect(listenForPalette, []);
  useEffect(() => {
    if (isOnline) return;
    const timer = setInterval(() => void get("/teams").catch(() => undefined), 1000);
    return () => clearInterval(timer);
  }, [isOnline]);
  return (
    <>
      <a class="skip" href="#main" onClick={skip}>
        {t.app.skip}
      </a>
      <Header />
      <div class="frame">
        <Navigation />
        <main id="main" tabIndex={-1}>
          <Page />
        </main>
      </div>
      {access.value === "granted" && <Palette pages={pages().map((name) => ({ name: t.app[name], note: "", href: hrefOf(name) }))} />}
      {dialogs.value.length === 0 && <Notices />}
    </>
  );
}

function skip(event: Event) {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

function Header() {
  const next: Record<Theme, Theme> = { system: "light", light: "dark", dark: "system" };
  return (
    <header class="top">
      <a class="brand" href={link()}>
        <span class="mark" aria-hidden="true" />
        cube
      </a>
      <div class="connection" role="status">
        {!online.value && <span class="badge bad">{t.app.reconnecting}</span>}
      </div>
      {access.value === "granted" && (
        <Button onClick={openPalette}>
          {t.palette.title} <kbd>Ctrl K</kbd>
        </Button>
      )}
      <Languages />
      <Button onClick={() => (theme.value = next[theme.value])} label={t.app.theme(t.app.themes[theme.value])}>
        {t.app.themes[theme.value]}
      </Button>
      {key.value && access.value === "granted" && <Button onClick={forget}>{t.app.forget}</Button>}
    </header>
  );
}

/** Each language is named in itself, for those who do not read the one that is shown. */
function Languages() {
  const next: Language = language.value === "en" ? "zh" : "en";
  const name = { en: "English", zh: "中文" }[next];
  return (
    <button type="button" lang={next} aria-label={`${name} (${t.app.language})`} onClick={() => choose(next)}>
      {name}
    </button>
  );
}

function forget() {
  leaveShells();
  forgetCells();
  signOut();
}

type Name = (typeof PAGES)[number] | "nodes";

function pages(): Name[] {
  return hasNodes.value ? [...PAGES, "nodes"] : [...PAGES];
}

function hrefOf(name: Name): string {
  return name === "overview" ? "#/" : link(name);
}

function Navigation() {
  const current = route.value[0] ?? "overview";
  return (
    <nav class="side" aria-label={t.app.pages}>
      {pages().map((name) => (
        <a key={name} href={hrefOf(name)} aria-current={current === name ? "page" : undefined}>
          {t.app[name]}
        </a>
      ))}
    </nav>
  );
}

function Page() {
  const [page = "", id] = route.value;
  const name = page === "sandboxes" && id ? "sandbox" : (PAGES.find((one) => one === (page || "overview")) ?? "nodes");
  const title = t.app.title(t.app[name]);
  useEffect(() => {
    document.title = title;
  }, [title]);
  if (access.value === "asked") return <SignIn />;
  if (access.value === "unknown") return <Opening />;
  switch (page) {
    case "":
      return <Overview />;
    case "sandboxes":
      return id ? <SandboxPage key={id} id={id} /> : <Sandboxes />;
    case "templates":
      return <Templates />;
    case "builds":
      return <Builds />;
    case "snapshots":
      return <Snapshots />;
    case "events":
      return <Events />;
    case "webhooks":
      return <Webhooks />;
    case "secrets":
      return <Secrets />;
    case "keys":
      return <Keys />;
    case "reports":
      return <Reports />;
    case "nodes":
      return <Nodes />;
    default:
      return (
        <>
          <h1>{t.common.noSuchPage}</h1>
          <p>
            <a href="#/">{t.app.overview}</a>
          </p>
        </>
      );
  }
}

/** Before the server has said whether it wants a key. */
function Opening() {
  return (
    <div class="waiting" role="status">
      <span class="sr">{t.app.asking}</span>
      <span class="bar" />
      <span class="bar" />
      <span class="bar short" />
    </div>
  );
}
