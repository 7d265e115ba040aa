// The JSON API of the same host.

import { t } from "./strings";

// eslint-disable-next-line @typescript-eslint/no-explicit-any
export type Data = any;
export const API = "/api/v1";

let token = sessionStorage.getItem("polygon-token") ?? "";
let askToken: () => Promise<string> = async () => "";
export function onToken(ask: () => Promise<string>): void {
  askToken = ask;
}
let asking: Promise<string> | null = null;
/** Another token than one that was refused: asked for once, however many requests wait for it. */
async function tokenInsteadOf(refused: string): Promise<string> {
  if (token !== refused) return token;
  const given = await (asking ??= askToken().finally(() => { asking = null; }));
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

export async function call(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<Data> {
  const sent = token;
  const response = await fetch(API + path, {
    method, signal, headers: headers(body !== undefined), body: body === undefined ? undefined : JSON.stringify(body),
  }).catch((error: Error) => {
    throw error.name === "AbortError" ? error : new Error(t("unreachable"));
  });
  if (response.status === 401) {
    if (await tokenInsteadOf(sent)) return call(method, path, body, signal);
  }
  const text = await response.text();
  const kind = response.headers.get("content-type") ?? "";
  const data = kind.includes("json") && text ? JSON.parse(text) : text;
  if (!response.ok) throw Object.assign(new Error((data && data.detail) || `HTTP ${response.status}`), { status: response.status });
  return data;
}
export const get = (path: string, signal?: AbortSignal): Promise<Data> => call("GET", path, undefined, signal);
export const post = (path: string, body: unknown, signal?: AbortSignal): Promise<Data> =>
  call("POST", path, body, signal);

export async function blob(path: string): Promise<Blob> {
  const response = await fetch(API + path, { headers: headers(false) });
  if (!response.ok) throw new Error(`HTTP ${response.status}`);
  return response.blob();
}

// Server-sent events by fetch, which can carry the token and the language; ends when the server does or `stop` says so.
export async function events(path: string, stop: AbortSignal, take: (data: Data) => void): Promise<void> {
  const response = await fetch(API + path, { headers: headers(false), signal: stop });
  if (response.status === 404) throw new Error(path.startsWith("/jobs") ? t("jobGone") : (await response.json()).detail);
  if (!response.ok || !response.body) throw new TypeError(`HTTP ${response.status}`);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
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
