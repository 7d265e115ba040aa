// The validator says where a value is wrong; its field is shown, marked and focused.

import { keptSignal } from "./kept";
import { t } from "./strings";

/** What is wrong with a file that somebody opened: it is said with the file's name, and names no field of the page. */
export class FileFault extends Error {
  readonly fault: string;
  constructor(file: string, { message }: Error) {
    super(t("faultOfFile", { file, fault: message }));
    this.name = "FileFault";
    this.fault = message;
  }
}

/** Which parts of the rail are open, by their names. */
export const folds = keptSignal<Record<string, boolean>>("folds", {});
export function fold(id: string, open: boolean): void {
  folds.value = { ...folds.value, [id]: open };
}

const FOLD_OF: Record<string, string> = { batch: "model", model: "model", runtime: "model", constraints: "goal", seed: "goal", objective: "goal", effort: "goal" };
let marked: HTMLElement[] = [];
// The path of what is wrong, whose field is marked in the next task, when the page shows it.
let wrong = "";

/** The path of a message as `batch.global_batch: found ...`, in which regions and devices may have any name; empty where
    it names no field. */
export const pathOf = (message: string): string => /^([\w*-]+(?:(?:\.(?! )|\[).*?)?)(?:: |：)/.exec(message)?.[1] ?? "";

/** The value at such a path, as text; of one that is not there all of it. */
export function valueAt(whole: object, path: string): string {
  const at = path.split(/[.[\]]+/).filter(Boolean).reduce<any>((it, key) => it?.[key], whole);
  return JSON.stringify(at ?? whole);
}

/** Take the mark away from fields whose path begins so: from all, unless something is said. */
export function unmark(of = ""): void {
  if (wrong.startsWith(of)) wrong = "";
  const right = marked.filter((element) => element.dataset.path!.startsWith(of));
  for (const element of right) {
    const own = element.dataset.fault; // what its field says itself of the value
    if (own) {
      element.setAttribute("aria-describedby", own);
      continue;
    }
    element.removeAttribute("aria-invalid");
    element.removeAttribute("aria-describedby");
  }
  marked = marked.filter((element) => !right.includes(element));
}

/** Mark the field that a message names; `said` is the id of the element that says it. */
export function mark(message: string, said: string, focus: boolean): void {
  unmark();
  const path = pathOf(message);
  if (!path) return;
  const part = FOLD_OF[path.split(/[.[]/)[0]];
  if (part) fold(part, true);
  wrong = path;
  setTimeout(() => {
    if (wrong !== path) return; // it is right by now
    const twin = path.replace(/^(cluster\.\w+)\[(\d+)\]\[(\d+)\]$/, "$1[$3][$2]"); // a link that is the same both ways has one field
    const own = (at: string): HTMLElement | null => document.querySelector<HTMLElement>(`[data-path="${CSS.escape(at)}"]`);
    for (let at = path; at; at = at.replace(/(\.[^.[\]]+|\[\d+\]|^[^.[\]]+|.)$/s, "")) {
      const field = own(at) ?? (at === path ? own(twin) : null);
      if (!field) continue;
      field.setAttribute("aria-invalid", "true");
      field.setAttribute("aria-describedby", said);
      for (let d = field.closest("details"); d; d = d.parentElement?.closest("details") ?? null) d.open = true;
      marked = [field];
      if (focus) field.focus();
      return;
    }
  });
}
