// The data plane: requests to a port of a sandbox, on this origin, by the headers that the SDKs send. Everything that
// comes back is the guest's: sizes are limited here, and what is shown goes through `text.ts`.
import { decode, encode } from "./base64";
import { ApiError, at, chunks, get, post, refused, send, PLAIN, type Detail, type Sandbox } from "./api";
import { t } from "./i18n";

export const AGENT = 49983;
export const INTERPRETER = 49999;
/** A frame of a process's output has at most this many bytes. */
const MOST_FRAME = 8 << 20;
const MOST_ANSWER = 16 << 20;
/** Of the answer to an upload. */
const MOST_UPLOADED = 64 << 10;

/** How to reach a sandbox. */
export interface Guest {
  id: string;
  token: string;
  traffic: string;
  /** A request to a paused sandbox may wake it. */
  isPaused: boolean;
}

export async function guestOf(id: string): Promise<Guest> {
  const detail = await get<Detail>(at`/sandboxes/${id}`);
  const guest = { id, token: detail.envdAccessToken ?? "", traffic: "", isPaused: detail.state === "paused" };
  if (detail.network?.allowPublicTraffic === false && !guest.isPaused) {
    // Only this answer has the token of the ports. It never shortens the timeout.
    const connected = await post<Sandbox>(at`/v2/sandboxes/${id}/connect`, { timeout: 0 });
    guest.traffic = connected.trafficAccessToken ?? "";
  }
  return guest;
}

export function headersOf(guest: Guest, port: number, user?: string): Record<string, string> {
  const headers: Record<string, string> = { "E2b-Sandbox-Id": guest.id, "E2b-Sandbox-Port": String(port) };
  if (guest.token) headers["X-Access-Token"] = guest.token;
  if (guest.traffic && port !== AGENT) headers["E2b-Traffic-Access-Token"] = guest.traffic;
  if (user) headers["Authorization"] = `Basic ${btoa(`${user}:`)}`;
  return headers;
}

async function reach(guest: Guest, port: number, path: string, init: RequestInit, user?: string): Promise<Response> {
  const headers = { ...headersOf(guest, port, user), ...(init.headers as Record<string, string>) };
  const response = await send(path, { ...init, headers });
  if (!response.ok) throw await refused(response);
  return response;
}

/** A call of the agent with one message each way. */
export async function call<T>(guest: Guest, method: string, message: unknown, user?: string): Promise<T> {
  const init = { method: "POST", headers: { "Content-Type": "application/json", "Connect-Protocol-Version": "1" }, body: JSON.stringify(message) };
  const response = await reach(guest, AGENT, `/${method}`, init, user);
  const text = await limited(response, MOST_ANSWER);
  return (text ? JSON.parse(text) : {}) as T;
}

async function limited(response: Response, most: number): Promise<string> {
  const parts: Uint8Array[] = [];
  let total = 0;
  for await (const part of chunks(response)) {
    total += part.length;
    if (total > most) throw new Error(t.errors.tooLong);
    parts.push(part);
  }
  return new TextDecoder().decode(join(parts, total));
}

export function join(parts: Uint8Array[], total: number): Uint8Array {
  const whole = new Uint8Array(total);
  let offset = 0;
  for (const part of parts) {
    whole.set(part, offset);
    offset += part.length;
  }
  return whole;
}

export interface ProcessEvent {
  start?: { pid?: number };
  data?: { stdout?: string; stderr?: string; pty?: string };
  end?: { exitCode?: number; status?: string; error?: string };
  keepalive?: unknown;
}

/** Calls an RPC that is answered with a stream of events. */
export async function* stream(guest: Guest, method: string, message: unknown, signal: AbortSignal, user?: string): AsyncGenerator<ProcessEvent> {
  const payload = new TextEncoder().encode(JSON.stringify(message));
  const body = new Uint8Array(5 + payload.length);
  new DataView(body.buffer).setUint32(1, payload.length);
  body.set(payload, 5);
  const headers = { "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1", "Keepalive-Ping-Interval": "20" };
  const response = await reach(guest, AGENT, `/${method}`, { method: "POST", headers, body, signal }, user);
  yield* frames(chunks(response));
}

/** What a program puts out, at most 1 MiB. */
export async function run(guest: Guest, [cmd, ...args]: string[], user: string): Promise<string> {
  const parts: Uint8Array[] = [];
  let total = 0;
  for await (const event of stream(guest, "process.Process/Start", { process: { cmd, args }, stdin: false }, AbortSignal.timeout(10_000), user)) {
    const part = decode(event.data?.stdout ?? "");
    parts.push(part);
    total += part.length;
    if (total > 1 << 20) throw new Error(t.errors.tooLong);
    if (event.end) break;
  }
  return new TextDecoder().decode(join(parts, total));
}

/** The messages in a stream of Connect frames: one byte of flags, four of length, JSON. */
export async function* frames(pieces: AsyncIterable<Uint8Array>): AsyncGenerator<ProcessEvent> {
  let held: Uint8Array[] = [];
  let total = 0;
  for await (const piece of pieces) {
    held.push(piece);
    total += piece.length;
    if (total < 5) continue;
    let buffer = held.length === 1 ? piece : join(held, total);
    for (;;) {
      if (buffer.length < 5) break;
      const length = new DataView(buffer.buffer, buffer.byteOffset).getUint32(1);
      if (length > MOST_FRAME) throw new Error(t.errors.frameTooLong);
      if (buffer.length < 5 + length) break;
      const message = JSON.parse(new TextDecoder().decode(buffer.subarray(5, 5 + length))) as { event?: ProcessEvent; error?: { message?: string } };
      if ((buffer[0] ?? 0) & 2) {
        if (message.error) throw new ApiError(200, message.error.message ?? t.errors.callFailed);
        return;
      }
      if (message.event) yield message.event;
      buffer = buffer.subarray(5 + length);
    }
    held = [buffer];
    total = buffer.length;
  }
  throw new Error(t.errors.cut);
}

export interface Entry {
  name: string;
  path: string;
  type: string;
  size: number;
  permissions: string;
  owner: string;
  modifiedTime?: string;
  symlinkTarget?: string;
}

export async function list(guest: Guest, path: string, user: string): Promise<Entry[]> {
  const { entries } = await call<{ entries?: Entry[] }>(guest, "filesystem.Filesystem/ListDir", { path, depth: 1 }, user);
  return (entries ?? []).map((entry) => ({ ...entry, size: Number(entry.size ?? 0) }));
}

function fileUrl(path: string, user: string): string {
  return `/files?path=${encodeURIComponent(path)}&username=${encodeURIComponent(user)}`;
}

export type Progress = (done: number, total: number) => void;

/** Downloads a file as bytes without a type, so that no browser shows it as a page of this origin. */
export async function download(guest: Guest, path: string, user: string, progress: Progress, signal: AbortSignal): Promise<Blob> {
  const response = await reach(guest, AGENT, fileUrl(path, user), { method: "GET", signal });
  const total = Number(response.headers.get("content-length") ?? 0);
  const parts: Blob[] = [];
  let done = 0;
  for await (const part of chunks(response)) {
    parts.push(new Blob([part as BlobPart]));
    done += part.length;
    progress(done, total);
  }
  if (total && done !== total) throw new Error(t.errors.downloadCut);
  return new Blob(parts, { type: "application/octet-stream" });
}

/** Uploads a file. `fetch` reports no progress, so this is an XMLHttpRequest. */
export function upload(guest: Guest, path: string, user: string, file: Blob, progress: Progress, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", fileUrl(path, user));
    for (const [name, value] of Object.entries(headersOf(guest, AGENT))) request.setRequestHeader(name, value);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.upload.onprogress = (event) => progress(event.loaded, event.total);
    request.onload = () => (request.status < 300 ? resolve() : reject(new ApiError(request.status, messageOf(request.responseText))));
    // The answer is the guest's.
    request.onprogress = (event) => {
      if (event.loaded <= MOST_UPLOADED) return;
      reject(new ApiError(request.status, t.errors.uploadTooLong));
      request.abort();
    };
    request.onerror = () => reject(new ApiError(0, t.errors.uploadCut));
    request.onabort = () => reject(new Error(t.errors.uploadStopped));
    signal.addEventListener("abort", () => request.abort());
    request.send(file);
  });
}

function messageOf(text: string): string {
  try {
    const body = JSON.parse(text.slice(0, 4096)) as { message?: unknown };
    return String(body.message ?? t.errors.fileRefused);
  } catch {
    return t.errors.fileRefused;
  }
}

/** Sends a cell, and yields the lines of its answer. */
export async function* execute(guest: Guest, code: string, language: string, signal: AbortSignal): AsyncGenerator<Record<string, unknown>> {
  const init = { ...PLAIN, method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ code, language }), signal };
  const response = await reach(guest, INTERPRETER, "/execute", init);
  const decoder = new TextDecoder();
  let rest = "";
  for await (const chunk of chunks(response)) {
    rest += decoder.decode(chunk, { stream: true });
    if (rest.length > MOST_ANSWER) throw new Error(t.errors.resultTooLong);
    const lines = rest.split("\n");
    rest = lines.pop() ?? "";
    for (const text of lines) {
      if (text.trim()) yield JSON.parse(text) as Record<string, unknown>;
    }
  }
  if (rest.trim()) yield JSON.parse(rest) as Record<string, unknown>;
}

export { decode, encode };
