// What is being asked: cluster, model, batch, limits and goal, with its history; kept across reloads, tab by tab.

import { computed, effect, signal } from "@preact/signals";
import type { Data } from "./api";
import { keptSignal } from "./kept";

export interface Draft {
  cluster: Data;
  model: Data;
  batch: Data;
  constraints: Data;
  runtime: Data;
  objective: string;
  effort: string;
  seed: number | string;
  /** What was measured, by the names of `measurable`: the values as measured, as text. Another value is given. */
  measured?: Record<string, string>;
  /** What the page filled in for links between regions that nobody gave, in the same way. */
  guessed?: Record<string, string>;
}
interface Kept {
  draft: Draft;
  past: Draft[];
  future: Draft[];
  asked: string;
  /** The search whose request the draft is or was, as this tab knows. */
  job: string;
}

const KEY = "polygon-draft";
const MOST_STEPS = 60;
const EMPTY: Draft = {
  cluster: { name: "mine", regions: [] }, model: "llama2-7b", batch: { global_batch: 512, seq_len: 2048 },
  constraints: {}, runtime: "polygon", objective: "time", effort: "quick", seed: 0,
};

// A tab goes on where it was; a new one begins with what was edited last, and then goes its own way.
function kept(): Kept {
  for (const store of [sessionStorage, localStorage]) {
    try {
      const found = JSON.parse(store.getItem(KEY) ?? "null");
      if (found?.draft?.cluster?.regions) return { ...found, job: store === sessionStorage ? (found.job ?? "") : "" };
    } catch {
      store.removeItem(KEY);
    }
  }
  return { draft: EMPTY, past: [], future: [], asked: "", job: "" };
}
const began = kept();
export const isNew = began.draft.cluster.regions.length === 0 && !began.past.length && !began.asked;
export const draft = signal<Draft>(began.draft);
const past = signal<Draft[]>(began.past);
const future = signal<Draft[]>(began.future);
// A draft is never changed, only followed by another: its text, of a large cluster 70 kB, is written once.
const texts = new WeakMap<Draft, string>();
function textOf(one: Draft): string {
  const text = texts.get(one) ?? JSON.stringify(one);
  texts.set(one, text);
  return text;
}
/** The draft as the open plan was asked for, as text; empty: no plan was. */
export const asked = signal(began.asked);
let job = began.job;
/** Whether a search was asked for from this draft, or the draft taken from it. */
export const isOfSearch = (id: string): boolean => id === job;
export const changed = computed(() => asked.value !== "" && textOf(draft.value) !== asked.value);
export const canUndo = computed(() => past.value.length > 0);
export const canRedo = computed(() => future.value.length > 0);

let saving = 0;
const toKeep = (): Kept => ({ draft: draft.value, past: past.value, future: future.value, asked: asked.value, job });
effect(() => {
  const now = toKeep();
  clearTimeout(saving);
  saving = window.setTimeout(() => save(now), 150);
});
const textOfKept = ({ draft, past, future, ...rest }: Kept): string =>
  `{"draft":${textOf(draft)},"past":[${past.map(textOf).join()}],"future":[${future.map(textOf).join()}],${JSON.stringify(rest).slice(1)}`;
function save(now: Kept): void {
  keep(sessionStorage, now);
  keep(localStorage, { ...now, past: [], future: [] });
}
function keep(store: Storage, now: Kept): void {
  try {
    store.setItem(KEY, textOfKept(now));
  } catch (error) {
    // The quota of the browser: the draft itself matters more than its history, and the newest of that most.
    if (now.past.length) keep(store, { ...now, past: now.past.slice(Math.ceil(now.past.length / 2)) });
    else if (now.future.length) keep(store, { ...now, future: [] });
    else console.warn("draft not kept", error);
  }
}
addEventListener("pagehide", () => save(toKeep()));

/** What was typed into the cluster's file and is not in the draft: its fault, once that is known. */
export const unread = keptSignal<{ text: string; fault: string } | null>("file", null);
let group = "";
/** Change the draft; changes of one group (say letters typed into one field) are undone together. */
export function edit(change: (next: Draft) => void, of = ""): void {
  const next = structuredClone(draft.value), { cluster } = next;
  change(next);
  if (next.cluster !== cluster) unread.value = null; // another cluster, of which nobody typed anything
  if (textOf(next) === textOf(draft.value)) return;
  // Of what was chosen and what is said by hand the later stays, too.
  for (const part of ["cluster", "model"] as const)
    if (!isLate && JSON.stringify(next[part]) !== JSON.stringify(draft.value[part])) coming.delete(part);
  if (!of || of !== group) past.value = [...past.value, draft.value].slice(-MOST_STEPS);
  group = of;
  future.value = [];
  draft.value = next;
}
let isLate = false;
/** Make a change that was asked for earlier: what was chosen since then, and is not here yet, still takes its place. */
export function late(change: () => void): void {
  isLate = true;
  try {
    change();
  } finally {
    isLate = false;
  }
}
/** Another cluster is being written, which takes the place of one that was chosen and is not here yet. */
export const clusterByHand = (): void => void coming.delete("cluster");
type Part = "cluster" | "model" | "measured" | "whole";
// What was chosen and is being fetched, by the part of the draft that it will be.
const coming = new Map<Part, Promise<void>>();
/** Change a part of the draft once what was chosen for it is here; of two choices the later one stays. */
export async function onceHere(part: Part, wanted: Promise<Data>, change: (found: Data) => void): Promise<void> {
  if (part === "whole") coming.clear();
  const whole = coming.get("whole")?.catch(() => undefined); // chosen before: what is chosen now is changed in it
  const isLast = (): boolean => coming.get(part) === work;
  const work: Promise<void> = Promise.all([wanted, whole])
    .then(([found]) => { if (isLast()) late(() => change(found)); }, (error: unknown) => { if (isLast()) throw error; });
  coming.set(part, work);
  try {
    await work;
  } finally {
    if (isLast()) coming.delete(part);
  }
}
/** Whether something was chosen that is not here yet. */
export const awaits = (): boolean => coming.size > 0;
/** Wait for what was chosen and is not here yet.

    @throws Error where it cannot be had. */
export const arrived = async (): Promise<void> => void (await Promise.all(coming.values()));
export function undo(): void {
  const last = past.value[past.value.length - 1];
  if (!last) return;
  coming.clear();
  future.value = [...future.value, draft.value];
  past.value = past.value.slice(0, -1);
  group = "";
  draft.value = last;
}
export function redo(): void {
  const next = future.value[future.value.length - 1];
  if (!next) return;
  coming.clear();
  past.value = [...past.value, draft.value];
  future.value = future.value.slice(0, -1);
  group = "";
  draft.value = next;
}

// What a file spells out that is as it would be unsaid.
const UNSAID: Record<string, unknown> = { parity: "safe", memory_headroom: 0.08 };
function lean(constraints: Data): Data {
  const said = (value: Data): boolean => value !== null && !(typeof value === "object" && Object.keys(value).length === 0);
  return Object.fromEntries(Object.entries(constraints ?? {}).filter(([key, value]) => said(value) && UNSAID[key] !== value));
}
/** The example that somebody finds who comes for the first time. */
export function start(cluster: Data): void {
  if (draft.value === EMPTY) draft.value = { ...EMPTY, cluster };
}
/** Take over what a plan or a search was asked for, as the server says it. */
export function take(request: Data, names: string[], id: string): void {
  const { cluster, model, batch, constraints, runtime } = request.problem;
  const known = names.includes(model?.name ?? model);
  const next: Draft = {
    cluster, model: known ? (model.name ?? model) : model, batch, constraints: lean(constraints),
    runtime: runtime ?? "polygon", objective: request.objective, effort: request.effort, seed: request.seed,
  };
  if (draft.value.cluster.regions.length === 0 && !past.value.length) draft.value = next; // there was nothing to return to
  else edit((it) => Object.assign(it, next));
  takeAsked(id, draft.value);
}
/** What a search is asked for is the draft, as it was when it was asked. */
export function takeAsked(id: string, as: Draft): void {
  job = id;
  asked.value = JSON.stringify(as);
}

/** What of a cluster can be measured, by names that outlive other edits (as the server's). */
function measurable(cluster: Data): Record<string, unknown> {
  const found: Record<string, unknown> = {};
  for (const [name, device] of Object.entries(cluster.devices ?? {})) found[`device.${name}`] = device;
  cluster.regions.forEach((region: Data, a: number) => {
    found[`${region.name}.intra_region`] = region.intra_region;
    region.nodes.forEach((node: Data, i: number) => { for (const key of ["intra_node", "inter_node"]) found[`${region.name}.nodes[${i}].${key}`] = node[key]; });
    for (const key of ["latency_ms", "bandwidth_gbps"]) cluster.regions.forEach((other: Data, b: number) => { if (a !== b) found[`${region.name} > ${other.name}.${key}`] = cluster[key]?.[a]?.[b]; });
  });
  return found;
}
/** Take a cluster with measured values, of which the names are given. */
export function takeMeasured(cluster: Data, names: string[]): void {
  edit((d) => {
    const now = measurable(cluster);
    d.cluster = cluster;
    d.measured = { ...d.measured, ...Object.fromEntries(names.map((name) => [name, JSON.stringify(now[name])])) };
  });
}
function unchanged(said: Record<string, string> | undefined): Set<string> {
  const now = measurable(draft.value.cluster);
  return new Set(Object.entries(said ?? {}).filter(([name, text]) => JSON.stringify(now[name]) === text).map(([name]) => name));
}
const measuredNow = computed(() => unchanged(draft.value.measured));
const guessedNow = computed(() => unchanged(draft.value.guessed));
/** Whether a value is as it was measured. */
export const isMeasured = (name: string): boolean => measuredNow.value.has(name);
/** Whether a value is as the page filled it in. */
export const isGuessed = (name: string): boolean => guessedNow.value.has(name);
/** Fill in a value between two regions that nobody gave. */
export function guess(d: Draft, key: string, a: number, b: number, value: unknown): void {
  const c = d.cluster;
  c[key][a][b] = value;
  d.guessed = { ...d.guessed, [`${c.regions[a].name} > ${c.regions[b].name}.${key}`]: JSON.stringify(value) };
}
/** Call a region by another name, and what is known of its links, too. */
export function rename(d: Draft, r: number, name: string): void {
  const old = d.cluster.regions[r].name;
  const renamed = (text: string): string => (text.startsWith(`${old} > `) ? name + text.slice(old.length) : text.replace(` > ${old}.`, ` > ${name}.`));
  for (const key of ["measured", "guessed"] as const)
    if (d[key]) d[key] = Object.fromEntries(Object.entries(d[key]).map(([text, value]) => [renamed(text), value]));
  d.cluster.regions[r].name = name;
}

/** What a search is asked: fields left empty are left out. */
export function request(): Data {
  const d = draft.value;
  const cluster = structuredClone(d.cluster);
  if (cluster.regions.length < 2) for (const key of ["latency_ms", "bandwidth_gbps", "capacity_gbps"]) delete cluster[key];
  const model = typeof d.model === "string" ? d.model : d.model.name;
  return {
    problem: { cluster, model: d.model, batch: d.batch, constraints: d.constraints, runtime: d.runtime },
    name: `${model} · ${cluster.name ?? ""}`.slice(0, 120), objective: d.objective, effort: d.effort, seed: d.seed,
  };
}
