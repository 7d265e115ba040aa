// The JSON API of the same host.

import { signal } from "@preact/signals";
import { t } from "./strings";

// eslint-disable-next-line @typescript-eslint/no-explicit-any
export type Data = any;
export const API = "/api/v1";

let token = sessionStorage.getItem("polygon-token") ?? "";
let askToken: (isWrong: boolean) => Promise<string> = async () => "";
/** How a token is asked for; `isWrong`: one that was given was refused. */
export function onToken(ask: (isWrong: boolean) => Promise<string>): void {
  askToken = ask;
}
let asking: Promise<string> | null = null;
/** Another token than one that was refused: asked for once, however many requests wait for it. */
async function tokenInsteadOf(refused: string): Promise<string> {
  if (token !== refused) return token;
  const given = await (asking ??= askToken(refused !== "").finally(() => { asking = null; }));
  if (given) sessionStorage.setItem("polygon-token", (token = given));
  return given;
}
function headers(body: boolean): Record<string, string> {
  return {
    "Accept-Language": document.documentElement.lang,
    ...(body ? { "Content-Type": "application/json" } : {}),
    ...(token ? { Authorization: `Bearer ${token}` } : {}),
  };
}

/** The server cannot be reached, or is on its way down. */
export class Unreachable extends TypeError {
  constructor() {
    super(t("notReached"));
  }
}
/** Whether it could not be reached when it was last asked; it is looked for until it can. */
export const isAway = signal(false);
const LOOK_MS = 1000;
let looking: Promise<void> | null = null;
/** When it can be reached again. */
export function back(): Promise<void> {
  const look = async (): Promise<void> => {
    isAway.value = true;
    do await new Promise((done) => setTimeout(done, LOOK_MS));
    while (!(await fetch("/", { method: "HEAD" }).then(({ ok }) => ok, () => false)));
    looking = null;
    isAway.value = false;
  };
  return (looking ??= look());
}
/** Ask, and again once the server is back where it cannot be reached. */
export async function patiently<T>(ask: () => Promise<T>): Promise<T> {
  for (;;) {
    try {
      return await ask();
    } catch (error) {
      if (!(error instanceof Unreachable)) throw error;
      await back();
    }
  }
}
const RELOADED = "polygon-reloaded";
/** A part of the page, which comes when it is first needed. A browser does not ask again for what it could not have once:
    as soon as the server is back the page is loaded anew, which loses nothing, and is of the version that runs there. */
export async function part<T>(load: () => Promise<T>, gone: AbortSignal): Promise<T> {
  const found = await load().catch(async () => {
    await back();
    if (gone.aborted || sessionStorage.getItem(RELOADED)) throw new Error(t("partMissing"));
    sessionStorage.setItem(RELOADED, "once");
    location.reload();
    return new Promise<never>(() => undefined);
  });
  sessionStorage.removeItem(RELOADED);
  return found;
}
function lost(error: Error | null): never {
  if (error?.name === "AbortError") throw error;
  void back();
  throw new Unreachable();
}
const GATEWAY = [502, 503]; // from what stands before a server that is gone, or from it while it ends
/** What the server answers: a stream and a file, too, ask for the token that they lack. */
async function reach(path: string, init: RequestInit = {}): Promise<Response> {
  const sent = token;
  const response = await fetch(API + path, { ...init, headers: headers(init.body !== undefined) }).catch(lost);
  if (GATEWAY.includes(response.status)) return lost(null);
  return response.status === 401 && (await tokenInsteadOf(sent)) ? reach(path, init) : response;
}

export async function call(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<Data> {
  const response = await reach(path, { method, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  const text = await response.text().catch(lost);
  const kind = response.headers.get("content-type") ?? "";
  const data = kind.includes("json") && text ? JSON.parse(text) : text;
  if (!response.ok) throw Object.assign(new Error((data && data.detail) || `HTTP ${response.status}`), { status: response.status });
  return data;
}
export const get = (path: string, signal?: AbortSignal): Promise<Data> => call("GET", path, undefined, signal);
export const post = (path: string, body: unknown, signal?: AbortSignal): Promise<Data> =>
  call("POST", path, body, signal);

export async function blob(path: string): Promise<Blob> {
  const response = await reach(path);
  if (!response.ok) throw new Error(`HTTP ${response.status}`);
  return response.blob();
}

// Server-sent events by fetch, which can carry the token and the language; ends when the server does or `stop` says so.
export async function events(path: string, stop: AbortSignal, take: (data: Data) => void): Promise<void> {
  const response = await reach(path, { signal: stop });
  if (response.status === 404) throw new Error(path.startsWith("/jobs") ? t("jobGone") : (await response.json()).detail);
  if (!response.ok || !response.body) throw new TypeError(`HTTP ${response.status}`);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(lost);
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop() ?? "";
    for (const part of parts) if (part.startsWith("data: ")) take(JSON.parse(part.slice(6)));
  }
}

export function download(name: string, content: string | Blob, type = "text/plain"): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(typeof content === "string" ? new Blob([content], { type }) : content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export async function copy(text: string): Promise<void> {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea"); // not a secure context: the old way
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
