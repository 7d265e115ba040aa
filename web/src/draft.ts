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
  /** What regions are called in `measured` and `guessed`, where one has another name now: no two alike. */
  ids?: string[];
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

const LINK = ["latency_ms", "bandwidth_gbps"]; // what a link between regions has to have
export const MATRICES = [...LINK, "capacity_gbps"];
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
  if (next.cluster !== cluster) {
    unread.value = null; // another cluster, of which nobody typed anything
    takeCluster(next, next.cluster);
  }
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
  if (draft.value !== EMPTY) return;
  const first = { ...EMPTY, cluster };
  adopt(first);
  draft.value = first;
}
/** Take over what a plan or a search was asked for, as the server says it. */
export function take(request: Data, id: string): void {
  const { cluster, model, batch, constraints, runtime } = request.problem;
  const next: Draft = {
    cluster, model, batch, constraints: lean(constraints),
    runtime: runtime ?? "polygon", objective: request.objective, effort: request.effort, seed: request.seed,
  };
  if (draft.value.cluster.regions.length === 0 && !past.value.length) { // there was nothing to return to
    adopt(next);
    draft.value = next;
  } else edit((it) => Object.assign(it, next));
  takeAsked(id, draft.value);
}
/** What a search is asked for is the draft, as it was when it was asked. */
export function takeAsked(id: string, as: Draft): void {
  job = id;
  asked.value = JSON.stringify(as);
}

// Regions, by what stays when they are renamed

/** Devices of a region, of those groups of nodes whose numbers are some. */
export const devicesIn = (region: Data): number => (region.nodes ?? []).reduce((n: number, g: Data) => {
  const own = Number(g.count) * Number(g.devices_per_node ?? 1);
  return n + (Number.isFinite(own) ? own : 0);
}, 0);
const namesOf = (cluster: Data): string[] => cluster.regions.map((region: Data) => String(region.name));
const idsOf = (d: Draft): string[] => d.ids ?? namesOf(d.cluster);
/** What a region is called in `isMeasured` and `isGuessed`. */
export const regionId = (r: number): string => idsOf(draft.value)[r];
function setIds(d: Draft, ids: string[]): void {
  if (ids.join("\n") === namesOf(d.cluster).join("\n")) delete d.ids;
  else d.ids = ids;
}
/** Of another cluster: a region whose name is known is that one. */
function idsAnew(before: Draft, cluster: Data): string[] {
  const names = namesOf(before.cluster), ids = idsOf(before);
  const known = namesOf(cluster).map((name) => ids[names.indexOf(name)]).map((id, i, all) => (all.indexOf(id) === i ? id : undefined));
  return namesOf(cluster).map((name, i) => known[i] ?? (known[i] = unlike(name, known)));
}
function unlike(name: string, taken: (string | undefined)[]): string {
  return taken.includes(name) ? unlike(`${name}'`, taken) : name;
}
/** Another cluster takes the place of a draft's that is being changed. */
function takeCluster(d: Draft, cluster: Data): void {
  d.cluster = cluster;
  setIds(d, idsAnew(draft.value, cluster));
  adopt(d);
}
/** Of every two regions the numbers and what a file calls the links between them, as polygon/domain/cluster.py. */
function pairs(cluster: Data): [number, number, string][] {
  const names = namesOf(cluster);
  return names.flatMap((a, i) => names.slice(i + 1).map((b, k): [number, number, string] => [i, i + 1 + k, `${a} - ${b}`]));
}
/** Links between regions that a cluster says nobody gave are filled in here as if the page had done it. */
function adopt(d: Draft): void {
  const said = new Set<string>(d.cluster.defaults);
  delete d.guessed;
  for (const [a, b, name] of said.size ? pairs(d.cluster) : []) {
    if (!said.delete(name)) continue;
    for (const key of LINK) for (const [i, j] of [[a, b], [b, a]]) guess(d, key, i, j, d.cluster[key][i][j]);
  }
  if (said.size) d.cluster.defaults = [...said];
  else delete d.cluster.defaults;
}
function filledPairs(): [number, number, string][] {
  const isFilled = (i: number, j: number): boolean => LINK.every((key) => isGuessed(`${regionId(i)} > ${regionId(j)}.${key}`));
  return pairs(draft.value.cluster).filter(([i, j]) => isFilled(i, j) && isFilled(j, i));
}
/** How many pairs of regions are joined by what nobody gave. */
export const filledIn = (): number => filledPairs().length;
/** The cluster as its file says it: links that are still as they were filled in are said to be nobody's. */
export function told(): Data {
  const d = draft.value, cluster = structuredClone(d.cluster);
  if (cluster.regions.length < 2) for (const key of MATRICES) delete cluster[key];
  const filled = filledPairs().map(([, , name]) => name);
  if (filled.length) cluster.defaults = [...(cluster.defaults ?? []), ...filled];
  return cluster;
}
export function appendRegion(d: Draft, region: Data): void {
  const ids = [...idsOf(d), unlike(region.name, idsOf(d))];
  d.cluster.regions.push(region);
  setIds(d, ids);
}
/** Take a region out, of the limits too. */
export function dropRegion(d: Draft, r: number): void {
  const ids = idsOf(d).filter((_, i) => i !== r);
  const [{ name }] = d.cluster.regions.splice(r, 1);
  setIds(d, ids);
  if (!namesOf(d.cluster).includes(name)) d.constraints = withRegion(d.constraints, name, null);
}
/** Call a region by another name, in the limits too: as these were before it was typed, as on its way there it may be
    another region's. */
export function rename(r: number, name: string): void {
  const of = `name ${r}`;
  const before = (of === group && past.value[past.value.length - 1]) || draft.value;
  const old = before.cluster.regions[r].name;
  const alone = namesOf(before.cluster).filter((other) => other === old).length === 1;
  edit((d) => {
    const ids = idsOf(d);
    d.cluster.regions[r].name = name;
    setIds(d, ids);
    if (alone) d.constraints = withRegion(before.constraints, old, name);
  }, of);
}
/** Limits that name a region by another name, or no more (null). */
function withRegion(constraints: Data, old: string, name: string | null): Data {
  const listed = (list: string[]): string[] => list.flatMap((it) => (it === old ? name ?? [] : it));
  const next = { ...constraints };
  const put = (key: string, value: Data): void => { if (Object.keys(value).length) next[key] = value; else delete next[key]; };
  for (const key of ["forbidden_regions", "first_stage_regions", "last_stage_regions"]) if (next[key]) put(key, listed(next[key]));
  if (next.stage_rules) put("stage_rules", next.stage_rules.flatMap((rule: Data) => {
    const told = Object.fromEntries(Object.entries(rule).map(([key, it]) => [key, Array.isArray(it) ? listed(it) : it]));
    // What is left of a rule that named this region alone says nothing.
    return Object.entries(told).some(([key, it]) => Array.isArray(it) && !it.length && rule[key].length) ? [] : told;
  }));
  if (next.egress_bytes_per_step) put("egress_bytes_per_step", Object.fromEntries(Object.entries(next.egress_bytes_per_step).flatMap(([key, it]) => (key === old ? (name === null ? [] : [[name, it]]) : [[key, it]]))));
  return next;
}
/** Take a group of nodes out; what was measured of those behind it stays theirs. */
export function dropNodes(d: Draft, r: number, i: number): void {
  d.cluster.regions[r].nodes.splice(i, 1);
  const start = `${idsOf(d)[r]}.nodes[`;
  if (d.measured) d.measured = Object.fromEntries(Object.entries(d.measured).flatMap(([key, value]) => {
    const j = key.startsWith(start) ? parseInt(key.slice(start.length)) : -1;
    return j === i ? [] : [[j > i ? start + (j - 1) + key.slice(start.length + String(j).length) : key, value]];
  }));
}

/** Give a type of devices of one's own another name, wherever it stands; none that is another's. */
export function renameDevice(old: string, name: string): boolean {
  if (name === old) return true;
  if (!name || name in draft.value.cluster.devices) return false;
  edit((d) => {
    const c = d.cluster, key = (text: string): string => (text === old ? name : text);
    c.devices = Object.fromEntries(Object.entries(c.devices).map(([of, it]) => [key(of), it]));
    for (const region of c.regions) for (const node of region.nodes) node.device = key(node.device);
    if (d.constraints.forbidden_devices) d.constraints.forbidden_devices = d.constraints.forbidden_devices.map(key);
    if (d.measured) d.measured = Object.fromEntries(Object.entries(d.measured).map(([of, it]) => [of === `device.${old}` ? `device.${name}` : of, it]));
  });
  return true;
}

/** What of a cluster can be measured, by names that outlive other edits: as the server's, with the regions' ids. */
function measurable(cluster: Data, ids: string[]): Record<string, unknown> {
  const found: Record<string, unknown> = {};
  for (const [name, device] of Object.entries(cluster.devices ?? {})) found[`device.${name}`] = device;
  cluster.regions.forEach((region: Data, a: number) => {
    found[`${ids[a]}.intra_region`] = region.intra_region;
    region.nodes.forEach((node: Data, i: number) => { for (const key of ["intra_node", "inter_node"]) found[`${ids[a]}.nodes[${i}].${key}`] = node[key]; });
    for (const key of LINK) cluster.regions.forEach((_: Data, b: number) => { if (a !== b) found[`${ids[a]} > ${ids[b]}.${key}`] = cluster[key]?.[a]?.[b]; });
  });
  return found;
}
/** Take a cluster with measured values, of which the server's names are given. */
export function takeMeasured(cluster: Data, names: string[]): void {
  edit((d) => {
    const said = Object.keys(measurable(cluster, namesOf(cluster))), own = Object.entries(measurable(cluster, idsAnew(d, cluster)));
    d.cluster = cluster;
    d.measured = { ...d.measured, ...Object.fromEntries(names.map((name) => own[said.indexOf(name)]).map(([id, value]) => [id, JSON.stringify(value)])) };
  });
}
function unchanged(said: Record<string, string> | undefined): Set<string> {
  const now = measurable(draft.value.cluster, idsOf(draft.value));
  return new Set(Object.entries(said ?? {}).filter(([name, text]) => JSON.stringify(now[name]) === text).map(([name]) => name));
}
const measuredNow = computed(() => unchanged(draft.value.measured));
const guessedNow = computed(() => unchanged(draft.value.guessed));
/** Whether a value is as it was measured. */
export const isMeasured = (name: string): boolean => measuredNow.value.has(name);
/** Whether a value is as the page filled it in. */
export const isGuessed = (name: string): boolean => guessedNow.value.has(name);
/** The same of two regions' link, by their names. */
export function isGuessedLink(a: string, b: string, key: string): boolean {
  const names = namesOf(draft.value.cluster);
  return isGuessed(`${regionId(names.indexOf(a))} > ${regionId(names.indexOf(b))}.${key}`);
}
/** Fill in a value between two regions that nobody gave. */
export function guess(d: Draft, key: string, a: number, b: number, value: unknown): void {
  d.cluster[key][a][b] = value;
  (d.guessed ??= {})[`${idsOf(d)[a]} > ${idsOf(d)[b]}.${key}`] = JSON.stringify(value);
}

/** What a search is asked: fields left empty are left out. */
export function request(): Data {
  const d = draft.value;
  return {
    problem: { cluster: told(), model: d.model, batch: d.batch, constraints: d.constraints, runtime: d.runtime },
    objective: d.objective, effort: d.effort, seed: d.seed,
  };
}
