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
  place.replaceChildren(h("div", { class: "row" }, t("working"), bar, note, h("button", { type: "button", id: "cancel", onclick: () => void call("DELETE", `/api/jobs/${id}`) }, t("cancel"))));
  let row: Data = null;
  try {
    await events(`/api/jobs/${id}/events`, mine.signal, (data) => { row = data; bar.value = data.progress; note.textContent = data.note; });
  } catch (error) {
    if (mine.signal.aborted) return null;
    throw error;
  }
  return row ?? call("GET", `/api/jobs/${id}`);
}
