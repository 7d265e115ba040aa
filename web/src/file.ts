// The cluster's file as somebody types it: read by the server, it becomes the draft's cluster.

import { back, post, Unreachable } from "./api";
import { clusterByHand, draft, edit, late, unread } from "./draft";

const RESTED_MS = 350;
let timer = 0;
let asked = new AbortController();

export function typed(text: string): void {
  forget(); // an answer about what stood there before says nothing of this
  clusterByHand();
  unread.value = { text, fault: unread.value?.fault ?? "" };
  timer = window.setTimeout(readSoon, RESTED_MS);
}
/** Have what was typed read, once the server can be reached. */
export function readSoon(): void {
  void readFile().catch(() => back().then(readSoon));
}
/** Have what was typed read now; whether nothing is left that is not in the draft.

    @throws Unreachable where nobody can read it. */
export async function readFile(): Promise<boolean> {
  forget();
  const now = unread.value;
  if (!now) return true;
  const { signal: gone } = (asked = new AbortController());
  try {
    const cluster = await post("/read", { kind: "cluster", text: now.text, name: draft.value.cluster.name || "cluster" }, gone);
    if (gone.aborted || unread.value !== now) return unread.value === null; // another cluster was chosen meanwhile
    late(() => edit((d) => { d.cluster = cluster; }, "file"));
    unread.value = null;
  } catch (error) {
    if (error instanceof Unreachable) throw error;
    if (!gone.aborted && unread.value === now) unread.value = { text: now.text, fault: (error as Error).message };
  }
  return unread.value === null;
}
function forget(): void {
  clearTimeout(timer);
  asked.abort();
}
/** Go back to the file of the fields. */
export function discard(): void {
  forget();
  unread.value = null;
}
