// The command palette: everything that the page can do, by a few letters of its name; and the keys for it.

import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { signal } from "@preact/signals";
import type { Data } from "./api";
import { toggleTheme } from "./colors";
import { canRedo, canUndo, changed, redo, undo } from "./draft";
import { called } from "./names";
import { attempt, copyLink, jobId, jobs, open, openPlan, planId, progress, savePlan, search, setChanges, stopJob, tab, takeAskedOf, tried, VIEWS } from "./state";
import { language, setLanguage, t, type Key } from "./strings";
import { keep } from "./summary";
import { Key as Shortcut } from "./ui";

export const asking = signal(false);
// Keys without Ctrl or ⌘ are in the way of who speaks to the page, or whose hand slips (WCAG 2.1.4): they can be put off.
const SINGLE = "polygon-single-keys";
const singleKeys = signal(localStorage.getItem(SINGLE) !== "off");
function setSingleKeys(on: boolean): void {
  localStorage.setItem(SINGLE, on ? "on" : "off");
  singleKeys.value = on;
}
addEventListener("storage", (e) => { if (e.key === SINGLE) singleKeys.value = e.newValue !== "off"; });
interface Command { name: string; keys?: string; run: () => void }

function commands(): Command[] {
  const plans = (jobs.value ?? []).filter((j: Data) => j.has_plan && !j.archived);
  return [
    progress.value ? { name: t("cancel"), run: () => void stopJob(jobId.value) } : { name: t("calculate"), keys: "⌘⏎", run: () => void search() },
    ...VIEWS.filter((v) => planId.value || ["overview", "cluster", "front", "runs"].includes(v)).map((v): Command => ({ name: `${t("goTo")} ${t(`view_${v}` as Key)}`, ...(singleKeys.value && { keys: String(VIEWS.indexOf(v) + 1) }), run: () => open(v) })),
    ...(canUndo.value ? [{ name: t("undo"), keys: "⌘Z", run: undo }] : []), ...(canRedo.value ? [{ name: t("redo"), keys: "⇧⌘Z", run: redo }] : []),
    ...(planId.value ? (["limits", "whatif", "whynot", "assumed"] as const).map((name): Command => ({ name: `${t("show")} ${t(({ limits: "tabLimits", whatif: "whatif", whynot: "whyNot", assumed: "tabAssumed" } as const)[name])}`, run: () => (tab.value = name) })) : []),
    ...(planId.value ? [{ name: t("takePlans"), run: () => void attempt(async () => void (await takeAskedOf(planId.value))) }] : []),
    ...(tried.value ? [{ name: t("keepVariant"), run: () => void keep() }, { name: t("reset"), run: () => setChanges({}) }] : []),
    ...(planId.value ? [{ name: t("shareLink"), run: () => void attempt(copyLink) }, { name: t("planFile"), run: () => void attempt(savePlan) }] : []),
    { name: t("theme"), run: toggleTheme }, { name: t("language"), run: () => setLanguage(language.value === "en" ? "zh" : "en") },
    { name: t(singleKeys.value ? "singleKeysOff" : "singleKeysOn"), run: () => setSingleKeys(!singleKeys.value) },
    ...plans.slice(0, 40).map((j: Data): Command => ({ name: `${t("open")}: ${called(j, jobs.value)}`, run: () => openPlan(j.id) })),
  ];
}

const writing = (e: Event): boolean => (e.target as HTMLElement).matches?.("input:not([type=range],[type=checkbox]), textarea, select");
export function keys(e: KeyboardEvent): void {
  const mod = e.metaKey || e.ctrlKey;
  const act = mod && e.key === "k" ? () => (asking.value = !asking.value)
    : mod && e.key === "Enter" ? () => { if (!progress.value || changed.value) void search(); }
    : mod && e.key.toLowerCase() === "z" && !writing(e) ? (e.shiftKey ? redo : undo)
    : mod && e.key === "y" && !writing(e) ? redo
    : mod || e.altKey || writing(e) || (e.target as HTMLElement).closest?.("dialog") || !singleKeys.value ? null
    : /^[1-8]$/.test(e.key) ? () => open(VIEWS[Number(e.key) - 1])
    : e.key === "?" ? () => (asking.value = true) : null;
  if (act) { e.preventDefault(); act(); }
}

export function Palette(): JSX.Element {
  const [text, setText] = useState("");
  const [at, setAt] = useState(0);
  // The field is told first: of one that has a command active at once Orca 43 hears the command alone, and takes what is
  // typed for its own keys.
  const [chosen, choose] = useState(false);
  const dialog = useRef<HTMLDialogElement>(null);
  // Before the next key: what is typed at once after the keys that open it goes into it.
  useLayoutEffect(() => {
    if (!asking.value) return dialog.current?.close(); // what had the focus has it again
    setText("");
    setAt(0);
    choose(false);
    dialog.current?.showModal();
  }, [asking.value]);
  useEffect(() => dialog.current?.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" }), [at]);
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = !asking.value ? [] : commands().filter((c) => words.every((w) => c.name.toLowerCase().includes(w)));
  const run = (c: Command | undefined): void => { dialog.current?.close(); asking.value = false; c?.run(); };
  const key = (e: KeyboardEvent): void => {
    const to = { ArrowDown: at + 1, ArrowUp: at - 1 }[e.key];
    if (to !== undefined) { e.preventDefault(); choose(true); setAt((to + found.length) % Math.max(1, found.length)); }
    if (e.key === "Enter") { e.preventDefault(); run(found[at]); }
  };
  // A dialog says late that it closed, the keys may have opened it again by then: Escape is told to all at once.
  return (
    <dialog ref={dialog} class="palette" aria-label={t("palette")} onCancel={(e) => { e.preventDefault(); asking.value = false; }} onClose={() => (asking.value = !!dialog.current?.open)} onClick={(e) => { if (e.target === dialog.current) asking.value = false; }}>{asking.value && <>
      <input autofocus type="text" role="combobox" aria-expanded="true" aria-controls="palette-list" aria-activedescendant={chosen && found[at] ? `command-${at}` : undefined} aria-label={t("paletteHint")} placeholder={t("paletteHint")} value={text} onInput={(e) => { setText(e.currentTarget.value); setAt(0); choose(true); }} onKeyDown={key} />
      <ul role="listbox" id="palette-list" aria-label={t("palette")}>{found.map((c, i) => <li key={c.name + i} id={`command-${i}`} role="option" aria-selected={i === at} onPointerMove={() => setAt(i)} onClick={() => run(c)}><span>{c.name}</span>{c.keys && <Shortcut keys={c.keys} />}</li>)}</ul>
      {found.length === 0 && <p class="empty" role="status">{t("nothingFound")}</p>}
      <label class="check"><input type="checkbox" id="single-keys" checked={singleKeys.value} onChange={(e) => setSingleKeys(e.currentTarget.checked)} />{t("singleKeys")}</label>
    </>}</dialog>
  );
}
