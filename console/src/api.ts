// The control plane: every call, its errors, its types (api/src/control/openapi.json).
import { t } from "./i18n";
import { access, key, reached, refusal } from "./session";

/** A refusal of the server, or `status` 0 if it could not be reached. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

export function explain(error: unknown): string {
  if (error instanceof ApiError) {
    // A message of the API says what to change; a failure of the server is looked up by its status.
    return error.status >= 500 ? `${error.message} (${error.status})` : error.message;
  }
  return error instanceof Error ? error.message : String(error);
}

export interface Answer<T> {
  body: T;
  headers: Headers;
}

/** Bytes of a refusal that are read. */
const MOST_REFUSAL = 4096;

/** Options of every request of this page: no cookies, no caches, no redirects, no referrer. */
export const PLAIN: RequestInit = {
  credentials: "omit",
  cache: "no-store",
  redirect: "error",
  referrerPolicy: "no-referrer",
};

/** Sends a request, and notes whether the server was reached. */
export async function send(path: string, init: RequestInit): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(path, { ...PLAIN, ...init });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    reached(false);
    throw new ApiError(0, t.errors.noAnswer);
  }
  reached(true);
  return response;
}

/** The pieces of a body. It is cancelled if the loop over them ends early. */
export async function* chunks(response: Response): AsyncGenerator<Uint8Array> {
  const reader = response.body?.getReader();
  if (!reader) return;
  let done = false;
  try {
    for (;;) {
      const next = await reader.read();
      done = next.done;
      if (next.done) return;
      yield next.value;
    }
  } finally {
    if (!done) await reader.cancel().catch(() => undefined);
  }
}

/** The first `most` bytes of a body, which may be a guest's. The rest is not read. */
async function start(response: Response, most: number): Promise<string> {
  const decoder = new TextDecoder();
  let text = "";
  let left = most;
  for await (const chunk of chunks(response)) {
    text += decoder.decode(chunk.subarray(0, left), { stream: true });
    left -= chunk.length;
    if (left <= 0) break;
  }
  return text;
}

/** The reason of a refusal. */
export async function refused(response: Response): Promise<ApiError> {
  const text = await start(response, MOST_REFUSAL).catch(() => "");
  try {
    const body: unknown = JSON.parse(text);
    const message = (body as { message?: unknown }).message;
    if (typeof message === "string") return new ApiError(response.status, message);
  } catch {
    // Not JSON: the status has to do.
  }
  return new ApiError(response.status, response.statusText || t.errors.refused);
}

export async function ask<T>(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<Answer<T>> {
  const headers: Record<string, string> = {};
  const used = key.value;
  if (used) headers["X-API-KEY"] = used;
  const init: RequestInit = { method, headers };
  if (signal) init.signal = signal;
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    init.body = JSON.stringify(body);
  }
  const response = await send(path, init);
  if (used !== key.value) throw new ApiError(401, t.errors.keyChanged);
  if (response.status === 401) {
    const error = await refused(response);
    refusal.value = used ? error.message : "";
    access.value = "asked";
    throw error;
  }
  // A refusal for lack of a scope is an answer to a key that is taken. Unknown routes are answered without looking at it.
  if (response.ok || response.status === 403) access.value = "granted";
  if (!response.ok) throw await refused(response);
  const text = await response.text();
  const isJson = (response.headers.get("content-type") ?? "").includes("json");
  return { body: (isJson && text ? JSON.parse(text) : text) as T, headers: response.headers };
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await ask<T>("GET", path, undefined, signal)).body;
}

export async function post<T>(path: string, body: unknown = {}): Promise<T> {
  return (await ask<T>("POST", path, body)).body;
}

export async function remove(path: string, body?: unknown): Promise<void> {
  await ask("DELETE", path, body);
}

/** A path with its parameters escaped: at`/sandboxes/${id}`. */
export function at(parts: TemplateStringsArray, ...values: string[]): string {
  return parts.map((part, index) => part + (index < values.length ? encodeURIComponent(values[index] ?? "") : "")).join("");
}

/** All pages of a list, at most `most` elements. */
export async function all<T>(path: string, most = 1000): Promise<T[]> {
  const found: T[] = [];
  let token = "";
  do {
    const join = path.includes("?") ? "&" : "?";
    const next = token ? `&nextToken=${encodeURIComponent(token)}` : "";
    const page = await ask<T[]>("GET", `${path}${join}limit=100${next}`);
    found.push(...page.body);
    token = page.headers.get("x-next-token") ?? "";
  } while (token && found.length < most);
  return found;
}

export interface Listed {
  templateID: string;
  sandboxID: string;
  alias?: string;
  startedAt: string;
  endAt: string;
  cpuCount: number;
  memoryMB: number;
  diskSizeMB: number;
  state: "running" | "paused";
  metadata?: Record<string, string>;
}

export interface Detail extends Listed {
  envdAccessToken?: string;
  allowInternetAccess?: boolean;
  domain?: string;
  network?: { allowOut?: string[]; denyOut?: string[]; dnsServers?: string[]; egressProxy?: unknown; rules?: Record<string, unknown>; allowPublicTraffic?: boolean };
  lifecycle?: { autoResume: boolean; onTimeout: "pause" | "kill"; onActivity?: unknown };
  pauseMode?: "full" | "filesystem";
}

export interface Sandbox {
  templateID: string;
  sandboxID: string;
  envdAccessToken?: string;
  trafficAccessToken?: string;
}

export interface Metric {
  timestampUnix: number;
  cpuCount: number;
  cpuUsedPct: number;
  memUsed: number;
  memTotal: number;
  diskUsed: number;
  diskTotal: number;
}

export interface LogEntry {
  timestamp: string;
  message: string;
  level: "debug" | "info" | "warn" | "error";
  fields: Record<string, string>;
  step?: string;
}

export interface NetworkEvent {
  timestamp: string;
  direction: "out" | "in";
  protocol: string;
  source: string;
  destination: string;
  reason: string;
  name?: string;
  count: number;
  call?: {
    method?: string;
    path?: string;
    status?: number;
    bytesOut: number;
    bytesIn: number;
    durationMs: number;
    rule?: string;
    secrets?: string[];
    refused?: string;
  };
}

export interface Template {
  templateID: string;
  buildID: string;
  cpuCount: number;
  memoryMB: number;
  diskSizeMB: number;
  storedBytes?: number;
  names: string[];
  aliases: string[];
  installed?: boolean;
  createdAt: string;
  updatedAt: string;
  spawnCount: number;
  buildCount: number;
  buildStatus: string;
}

export interface TemplateBuild {
  buildID: string;
  status: "waiting" | "building" | "ready" | "error";
  createdAt: string;
  finishedAt?: string;
  cpuCount: number;
  memoryMB: number;
}

export interface Tag {
  tag: string;
  buildID: string;
  createdAt: string;
}

export interface BuildInfo {
  status: "waiting" | "building" | "ready" | "error";
  logEntries: LogEntry[];
  reason?: { message: string; step?: string };
}

export interface Snapshot {
  snapshotID: string;
  names: string[];
  sourceSandboxID?: string;
  createdAt?: string;
  storedBytes?: number;
}

export interface Secret {
  secretID: string;
  name: string;
  currentVersion: number;
  hosts?: string[];
  metadata: Record<string, string>;
  createdAt: string;
  updatedAt: string;
}

export interface LifecycleEvent {
  id: string;
  type: string;
  timestamp: string;
  sandboxId: string;
  sandboxTemplateId?: string;
  eventData: {
    sandbox_metadata?: Record<string, string>;
    set_timeout?: string;
    execution?: { started_at?: string; execution_time?: number };
    reason?: string;
    network?: { count?: number; destination?: string; name?: string };
  };
}

export interface Webhook {
  id: string;
  name: string;
  url: string;
  enabled: boolean;
  events: string[];
  createdAt: string;
}

export interface Deliveries {
  data: { eventType: string; sandboxId: string; attempts: Attempt[] }[];
}

interface Attempt {
  id: string;
  status: "success" | "failed";
  durationMs: number;
  requestBody: string;
  responseHttpStatusCode?: number;
  errorMessage?: string;
  timestamp: string;
}

export interface DeliveryStats {
  total: number;
  failed: number;
  durationMs: { minimum: number; average: number; maximum: number };
}

export interface BenchmarkRun {
  name: string;
  bytes: number;
  modifiedAt: string;
}

export interface Key {
  id: string;
  name: string;
  scopes: string[];
  createdAt: string;
}
