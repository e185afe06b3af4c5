// The frame around every page: navigation, connection, theme, key.
import { effect, signal, untracked } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { get } from "./api";
import { forgetCells } from "./cells/cells";
import { Keys } from "./pages/keys";
import { Nodes } from "./pages/nodes";
import { Overview } from "./pages/overview";
import { Reports } from "./pages/reports";
import { Sandboxes } from "./pages/sandboxes";
import { Secrets } from "./pages/secrets";
import { SignIn } from "./pages/sign-in";
import { Snapshots } from "./pages/snapshots";
import { Templates } from "./pages/templates";
import { SandboxPage } from "./sandbox/page";
import { leaveShells } from "./sandbox/shells";
import { access, dialogs, key, link, online, revival, route, signOut, theme, type Theme } from "./session";
import { Notices } from "./ui/notices";
import { Button } from "./ui/parts";

/** Whether the server is a node of a cluster. */
const hasNodes = signal(false);

const PAGES: [string, string][] = [
  ["", "Overview"],
  ["sandboxes", "Sandboxes"],
  ["templates", "Templates"],
  ["snapshots", "Snapshots"],
  ["secrets", "Secrets"],
  ["keys", "Keys"],
  ["reports", "Reports"],
];

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
  useEffect(() => {
    if (isOnline) return;
    const timer = setInterval(() => void get("/teams").catch(() => undefined), 1000);
    return () => clearInterval(timer);
  }, [isOnline]);
  return (
    <>
      <a class="skip" href="#main" onClick={skip}>
        Skip to the content
      </a>
      <Header />
      <div class="frame">
        <Navigation />
        <main id="main" tabIndex={-1}>
          <Page />
        </main>
      </div>
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
        {!online.value && <span class="badge bad">Reconnecting to the server…</span>}
      </div>
      <Button onClick={() => (theme.value = next[theme.value])} label={`Theme: ${theme.value}. Change`}>
        {{ system: "◐ System", light: "○ Light", dark: "● Dark" }[theme.value]}
      </Button>
      {key.value && access.value === "granted" && <Button onClick={forget}>Forget key</Button>}
    </header>
  );
}

function forget() {
  leaveShells();
  forgetCells();
  signOut();
}

function Navigation() {
  const current = route.value[0] ?? "";
  const pages = hasNodes.value ? [...PAGES, ["nodes", "Nodes"] as [string, string]] : PAGES;
  return (
    <nav class="side" aria-label="Pages">
      {pages.map(([path, name]) => (
        <a key={path} href={path ? link(path) : "#/"} aria-current={current === path ? "page" : undefined}>
          {name}
        </a>
      ))}
    </nav>
  );
}

function Page() {
  const [page = "", id] = route.value;
  const name = PAGES.find(([path]) => path === page)?.[1] ?? "Nodes";
  useEffect(() => {
    document.title = `${page === "sandboxes" && id ? "Sandbox" : name} · cube console`;
  }, [page, id]);
  if (access.value === "asked") return <SignIn />;
  if (access.value === "unknown") return <Opening />;
  switch (page) {
    case "":
      return <Overview />;
    case "sandboxes":
      return id ? <SandboxPage key={id} id={id} /> : <Sandboxes />;
    case "templates":
      return <Templates />;
    case "snapshots":
      return <Snapshots />;
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
          <h1>No such page</h1>
          <p>
            <a href="#/">Overview</a>
          </p>
        </>
      );
  }
}

/** Before the server has said whether it wants a key. */
function Opening() {
  return (
    <div class="waiting" role="status">
      <span class="sr">Asking the server</span>
      <span class="bar" />
      <span class="bar" />
      <span class="bar short" />
    </div>
  );
}
