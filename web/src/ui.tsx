// Small parts that every pane is made of.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { patiently } from "./api";
import { fold, folds } from "./faults";
import { t } from "./strings";

export type Child = ComponentChildren;

const APPLE = /Mac|iPhone|iPad/.test(navigator.platform);
/** A key, as this machine's keyboard has it; what it is pressed with is said in Apple's signs. */
export const Key = ({ keys }: { keys: string }): JSX.Element => (
  <kbd aria-hidden="true">{APPLE ? keys : keys.replace("⇧", "Shift ").replace("⌘", "Ctrl ").replace("⏎", "↵")}</kbd>
);

/** Arrow keys (up and down in a list that is one above the other), Home and End walk a list of tabs, and the focus goes along. */
export const walks = (at: number, count: number, go: (to: number) => void, down = false) => (e: KeyboardEvent): void => {
  const to = { [down ? "ArrowDown" : "ArrowRight"]: at + 1, [down ? "ArrowUp" : "ArrowLeft"]: at - 1, Home: 0, End: count - 1 }[e.key];
  if (to === undefined) return;
  e.preventDefault();
  const list = e.currentTarget as HTMLElement;
  go((to + count) % count);
  queueMicrotask(() => list.querySelector<HTMLElement>("[aria-selected=true]")?.focus());
};

export function Section({ title, id, note, children, tools }: { title: string; id?: string; note?: Child; children: Child; tools?: Child }): JSX.Element {
  return (
    <section id={id} class="section" aria-label={title}>
      <div class="section-head"><h2>{title}</h2>{note && <span class="soft">{note}</span>}<span class="grow" />{tools}</div>
      {children}
    </section>
  );
}

export function Fold({ id, title, summary, children, tools }: { id: string; title: string; summary: string; children: () => JSX.Element; tools?: JSX.Element }): JSX.Element {
  const isOpen = folds.value[id] === true;
  return (
    <section class={isOpen ? "fold open" : "fold"}>
      <div class="fold-head"><h2><button type="button" id={`fold-${id}`} aria-expanded={isOpen} onClick={() => fold(id, !isOpen)}><span class="twist" aria-hidden="true">{isOpen ? "▾" : "▸"}</span><span><b>{title}</b><small>{summary}</small></span></button></h2>{tools}</div>
      {isOpen && <div class="fold-body">{children()}</div>}
    </section>
  );
}

export function Table({ label, head, rows, numeric = [] }: { label: string; head: Child[]; rows: Child[][]; numeric?: number[] }): JSX.Element {
  const side = (i: number): string | undefined => (numeric.includes(i) ? "number" : undefined);
  return (
    <div class="scroll" tabIndex={0} role="group" aria-label={label}>
      <table>
        <thead><tr>{head.map((cell, i) => (cell === "" ? <td key={i} /> : <th key={i} scope="col" class={side(i)}>{cell}</th>))}</tr></thead>
        <tbody>{rows.map((cells, r) => <tr key={r}>{cells.map((cell, i) => (i === 0 && cell !== "" && !numeric.includes(0) ? <th key={i} scope="row">{cell}</th> : <td key={i} class={side(i)}>{cell}</td>))}</tr>)}</tbody>
      </table>
    </div>
  );
}

export const Skeleton = ({ lines = 3 }: { lines?: number }): JSX.Element => (
  <div class="skeleton" role="img" aria-label={t("computing")}>{Array.from({ length: lines }, (_, i) => <i key={i} style={{ width: `${92 - 17 * (i % 3)}%` }} />)}</div>
);
export const Empty = ({ children }: { children: Child }): JSX.Element => <p class="empty">{children}</p>;

/** What a question to the server answers; asked again when `key` changes. */
export function useAnswer<T>(ask: (stop: AbortSignal) => Promise<T>, key: unknown): { data: T | null; error: string } {
  const [state, set] = useState<{ data: T | null; error: string }>({ data: null, error: "" });
  useEffect(() => {
    const stop = new AbortController();
    set((old) => ({ data: old.data, error: "" }));
    patiently(() => ask(stop.signal))
      .then((data) => { if (!stop.signal.aborted) set({ data, error: "" }); })
      .catch((error: Error) => { if (!stop.signal.aborted) set({ data: null, error: error.message }); });
    return () => stop.abort();
  }, [key]);
  return state;
}
export const Answer = <T,>({ of, lines, children }: { of: { data: T | null; error: string }; lines?: number; children: (data: T) => Child }): JSX.Element =>
  of.error ? <p class="error" role="alert">{of.error}</p> : of.data === null ? <Skeleton lines={lines} /> : <>{children(of.data)}</>;

// Fields. `path` is where the validator's messages say that they are.

export const number = (text: string): number | string => (text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : text);

/** What a number may be; `optional`: or nothing. */
export interface Allowed { whole?: boolean; above?: number; least?: number; below?: number; most?: number; optional?: boolean }
/** What is allowed, in words, where a text is none of it: known before the server is asked, which has the last word. */
function fault(text: string, { whole, above = -Infinity, least = -Infinity, below = Infinity, most = Infinity, optional }: Allowed): string {
  const x = Number(text), isEmpty = text.trim() === "";
  if (isEmpty ? optional : (whole ? Number.isInteger(x) : Number.isFinite(x)) && x > above && x >= least && x < below && x <= most) return "";
  const bounds = Object.entries({ ">": above, "≥": least, "<": below, "≤": most }).filter(([, limit]) => Number.isFinite(limit));
  return t("fieldAllowed", { what: [t(whole ? "wholeNumber" : "aNumber"), bounds.map(([sign, limit]) => `${sign}\u00a0${limit.toLocaleString("en")}`).join(", ")].join(" ") });
}
interface FieldProps {
  label: string;
  path: string;
  value: unknown;
  set: (text: string) => void;
  unit?: string;
  placeholder?: string;
  mark?: Child;
  mode?: "decimal" | "numeric" | "text";
  hidden?: boolean;
  allowed?: Allowed;
}
export function Field({ label, path, value, set, unit, placeholder, mark, mode = "decimal", hidden, allowed }: FieldProps): JSX.Element {
  const text = String(value ?? "");
  const wrong = allowed ? fault(text, allowed) : "";
  const said = wrong ? `${path.replace(/\s/g, "_")}-allowed` : undefined;
  return (
    <div class="field"><label><span class={hidden ? "hidden" : undefined}>{label}{mark && <> {mark}</>}</span>
      <span class="input">
        <input value={text} data-path={path} data-fault={said} aria-invalid={wrong ? "true" : undefined} aria-describedby={said} inputMode={mode} placeholder={placeholder} onInput={(e) => set(e.currentTarget.value)} autocomplete="off" spellcheck={false} />
        {unit && <i>{unit}</i>}
      </span></label>
      {wrong && <small class="error" id={said}>{wrong}</small>}
    </div>
  );
}
/** What `acts` does something as soon as it is chosen: its list opens by any key, as arrows in a closed one would choose. */
export const Choice = ({ label, path, value, options, set, hidden, acts }: { label: string; path: string; value: string; options: [string, string][]; set: (value: string) => void; hidden?: boolean; acts?: boolean }): JSX.Element => (
  <label class="field"><span class={hidden ? "hidden" : undefined}>{label}</span>
    <select value={value} data-path={path} onKeyDown={acts ? opens : undefined} onChange={(e) => set(e.currentTarget.value)}>{options.map(([key, text]) => <option key={key} value={key} selected={key === value}>{text}</option>)}</select>
  </label>
);
export function Chips({ label, path, options, chosen, set }: { label: string; path: string; options: string[]; chosen: string[]; set: (chosen: string[]) => void }): JSX.Element {
  // What was chosen of another cluster is still asked: it stands here until somebody takes it out.
  const all = [...options, ...chosen.filter((o) => !options.includes(o))];
  const change = (option: string, on: boolean): void => set(all.filter((o) => (o === option ? on : chosen.includes(o))));
  return (
    <fieldset class="chips" data-path={path} tabIndex={-1}><legend>{label}</legend><div>{all.map((option) => (
      <label key={option}><input type="checkbox" checked={chosen.includes(option)} onChange={(e) => change(option, e.currentTarget.checked)} /><span>{option}{!options.includes(option) && <i class="soft"> {t("notThere")}</i>}</span></label>
    ))}</div></fieldset>
  );
}
function opens(e: KeyboardEvent): void {
  if (e.ctrlKey || e.metaKey || e.altKey || !(e.key.startsWith("Arrow") || e.key.length === 1)) return;
  e.preventDefault();
  (e.currentTarget as HTMLSelectElement).showPicker?.();
}
interface UploadProps { label: string; id: string }
/** A button that opens a file, or several (`many`, by their names). */
export function Upload(props: UploadProps & ({ many?: false; take: (text: Promise<string>, file: string) => void } | { many: true; take: (texts: Record<string, string>) => void })): JSX.Element {
  const read = async (input: HTMLInputElement): Promise<void> => {
    const files = [...(input.files ?? [])];
    if (props.many) {
      const texts = await Promise.all(files.map(async (file) => [file.name, await file.text()] as const));
      if (texts.length) props.take(Object.fromEntries(texts));
    } else if (files[0]) props.take(files[0].text(), files[0].name);
    input.value = "";
  };
  return <label class="button upload"><input type="file" id={props.id} multiple={props.many} onChange={(e) => void read(e.currentTarget)} />{props.label}</label>;
}
export function Menu({ label, id, name, children }: { label: Child; id?: string; name?: string; children: (close: () => void) => Child }): JSX.Element {
  const [open, set] = useState(false);
  const place = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const away = (e: Event): void => { if (!place.current?.contains(e.target as Node)) set(false); };
    addEventListener("pointerdown", away);
    return () => removeEventListener("pointerdown", away);
  }, []);
  return (
    <div class="menu" ref={place} onFocusOut={(e) => { if (e.relatedTarget && !place.current?.contains(e.relatedTarget as Node)) set(false); }} onKeyDown={(e) => { if (e.key === "Escape") { set(false); (place.current?.firstElementChild as HTMLElement).focus(); } }}>
      <button type="button" id={id} aria-label={name} title={name} aria-expanded={open} onClick={() => set(!open)}>{label}</button>
      {open && <div class="menu-list">{children(() => set(false))}</div>}
    </div>
  );
}
