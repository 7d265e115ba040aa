// The JSON API of the same host.

// eslint-disable-next-line @typescript-eslint/no-explicit-any
export type Data = any;

let token = sessionStorage.getItem("polygon-token") ?? "";
export let askToken: () => Promise<string> = async () => "";
export function onToken(ask: () => Promise<string>): void {
  askToken = ask;
}
export function tokenQuery(): string {
  return token ? `?token=${encodeURIComponent(token)}` : "";
}

export async function call(method: string, path: string, body?: unknown): Promise<Data> {
  const response = await fetch(path, {
    method,
    headers: { ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...(token ? { Authorization: `Bearer ${token}` } : {}) },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (response.status === 401) {
    const given = await askToken();
    if (given) {
      token = given;
      sessionStorage.setItem("polygon-token", given);
      return call(method, path, body);
    }
  }
  const text = await response.text();
  const kind = response.headers.get("content-type") ?? "";
  const data = kind.includes("json") && text ? JSON.parse(text) : text;
  if (!response.ok) throw new Error((data && data.detail) || `HTTP ${response.status}`);
  return data;
}
export const get = (path: string): Promise<Data> => call("GET", path);
export const post = (path: string, body: unknown): Promise<Data> => call("POST", path, body);

export function download(name: string, text: string, type = "text/plain"): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
