// A job in the background: progress, stopping, and its end.

import { call, events, type Data } from "./api";
import { h } from "./dom";
import { t } from "./strings";

let stop: AbortController | null = null;

// Show a job's progress in a place and wait for its end; null when another job took its place meanwhile.
export async function follow(id: string, place: HTMLElement): Promise<Data | null> {
  stop?.abort();
  const mine = (stop = new AbortController());
  const bar = h("progress", { max: "1", "aria-label": t("working") });
  const note = h("span", { class: "soft" });
  const halt = h("button", { type: "button", id: "cancel", onclick: () => { halt.disabled = true; halt.textContent = t("stopping"); void call("DELETE", `/api/jobs/${id}`).catch(() => { halt.disabled = false; halt.textContent = t("cancel"); }); } }, t("cancel"));
  place.replaceChildren(h("div", { class: "row" }, t("working"), bar, note, halt));
  let row: Data = null;
  // A server that ends begins its jobs again when it is back: wait for it.
  for (; ;) {
    try {
      await events(`/api/jobs/${id}/events`, mine.signal, (data) => { row = data; bar.value = data.progress; note.textContent = data.note; });
      if (row && !running(row)) return row;
    } catch (error) {
      if (mine.signal.aborted) return null;
      if (!(error instanceof TypeError)) throw error;
    }
    note.textContent = t("unreachable");
    await new Promise((resolve) => setTimeout(resolve, 1000));
    if (mine.signal.aborted) return null;
  }
}
export const running = (row: Data): boolean => row.state === "queued" || row.state === "running";
