// What the page knows: where it is, the plan that is open, what is tried on it, and the search that runs.

import { batch, computed, effect, signal, untracked } from "@preact/signals";
import { call, copy, download, events, get, isAway, patiently, post, type Data } from "./api";
import { arrived, awaits, changed, draft, isNew, isOfSearch, onceHere, request, start, take, takeAsked } from "./draft";
import { FileFault, mark, pathOf, unmark, valueAt } from "./faults";
import { readFile } from "./file";
import { focusSoon } from "./focus";
import { roundSeconds } from "./format";
import { keptSignal } from "./kept";
import { called, isChanges } from "./names";
import { language, t } from "./strings";

export const VIEWS = ["overview", "cluster", "strategy", "communication", "compare", "front", "deploy", "runs"] as const;
export type View = (typeof VIEWS)[number];
export type Tab = "limits" | "whatif" | "whynot" | "assumed";

// The address: plan, view, running search, what is tried, plans beside it. Back and a shared link go by it.
export const view = signal<View>("overview");
export const planId = signal("");
export const beside = signal<string[]>([]);
export const jobId = signal("");
export const runName = signal("");
export const tab = keptSignal<Tab | "">("drawer", innerWidth > 1180 ? "limits" : "");
export const changes = signal<Record<string, unknown>>({});

export const catalogue = signal<Data>(null);
export const row = signal<Data>(null);
export const planned = signal<Data>(null);
export const shown = signal<Data>(null);
export const limits = signal<Data>(null);
/** Links that nobody gave: those first with which another plan would be faster. */
export const assumed = signal<Data[] | null>(null);
/** What the first limits would bring with the cluster planned anew, by their number. */
export const anew = signal<Record<number, Data>>({});
export const jobs = signal<Data[] | null>(null);
export const progress = signal<Data>(null);
export const trouble = signal("");
export const notice = signal("");
/** What a screen reader alone is told: what came out of work that a pane began. */
export const outcome = signal("");
export const loading = signal(false);
/** Whether the draft is another plan's still, and what the plan that is being opened was asked for will take its place. */
export const arriving = signal(false);
/** What the pointer is on: a stage, a region, or two regions that a link joins. */
export const pointed = signal<{ stage?: number; region?: string; link?: string }>({});
/** What lights up with it: stages, regions and the ways between them; null where the pointer is on nothing. */
export const lit = computed(() => {
  const { stage, region, link } = pointed.value, v = shown.value;
  if (stage === undefined && region === undefined && link === undefined) return null;
  const ends = link?.split("\n") ?? [];
  const regions = new Set(region === undefined ? ends : [region]), stages = new Set<number>(stage === undefined ? [] : [stage]);
  v?.stages.forEach((s: Data, i: number) => {
    const own: string[] = s.workers.map((w: Data) => w.region);
    if (i === stage) for (const name of own) regions.add(name);
    if (own.some((name) => name === region || ends.includes(name))) stages.add(i);
  });
  const way = (a: string, b: string): boolean => (link !== undefined ? link === `${a}\n${b}` : regions.has(a) || regions.has(b));
  return { regions, stages, way };
});
/** The region in the editor. */
export const selected = keptSignal("region", "");
export const tried = computed(() => Object.keys(changes.value).length > 0);
const NOTHING = "{}";
// The changes with which `shown` is priced, as text: while others are, its figures are not theirs.
const pricedWith = signal(NOTHING);
/** Whether what is shown is priced with what is tried. */
export const isPriced = computed(() => pricedWith.value === JSON.stringify(changes.value));

function address(): string {
  const parts = new URLSearchParams();
  if (planId.value) parts.set("plan", planId.value);
  parts.set("view", view.value);
  if (jobId.value) parts.set("job", jobId.value);
  if (tried.value) parts.set("what", JSON.stringify(changes.value));
  if (runName.value) parts.set("run", runName.value);
  if (beside.value.length) parts.set("with", beside.value.join(","));
  return `#${parts}`;
}
/** What an address says is tried: nothing where nobody could try it, as in one that was cut short; the rest the server judges. */
function changesOf(text: string | null): Record<string, unknown> {
  try {
    const found = JSON.parse(text ?? "{}");
    return isChanges(found) ? found : {};
  } catch {
    return {};
  }
}
// What a plan or a search may be called (as in polygon/web/search_routes.py): what an address says goes into paths of the API.
const ID = /^[\w-]{1,40}$/, RUN = /^\w[\w.-]{0,200}$/;
const MOST_BESIDE = 3;
function read(): void {
  const parts = new URLSearchParams(location.hash.slice(1));
  const wanted = parts.get("view") as View;
  const named = (key: string): string[] => (parts.get(key) ?? "").split(",").filter(Boolean);
  const gone = ["plan", "job", "with"].flatMap(named).find((id) => !ID.test(id));
  const ids = (key: string): string[] => named(key).filter((id) => ID.test(id));
  batch(() => {
    if (!fault) trouble.value = ""; // it was said of where somebody was
    if (gone !== undefined) trouble.value = t("planGone", { id: gone });
    view.value = VIEWS.includes(wanted) ? wanted : "overview";
    beside.value = ids("with").slice(0, MOST_BESIDE);
    jobId.value = ids("job")[0] ?? "";
    runName.value = named("run").find((name) => RUN.test(name)) ?? "";
    changes.value = changesOf(parts.get("what"));
    planId.value = ids("plan")[0] ?? "";
  });
}
let going = false;
/** Go somewhere by a change of the signals above; Back returns. */
export function go(change: () => void): void {
  going = true;
  batch(change);
  going = false;
  if (address() !== location.hash) history.pushState(null, "", address());
}
export const open = (to: View): void => go(() => (view.value = to));

/** What is wrong with a value of what is asked: said as long as that value stands there, and when it does again. */
let fault: { message: string; path: string; value: string; isSaid: boolean } | null = null;
effect(() => {
  const now = draft.value;
  if (!fault) return;
  const { message, path, value } = fault, stands = valueAt(now, path) === value;
  if (stands === fault.isSaid) return;
  fault.isSaid = stands;
  if (stands) {
    trouble.value = message;
    mark(message, "trouble", false);
  } else {
    unmark(path);
    if (trouble.peek() === message) trouble.value = "";
  }
});
export const say = (error: unknown): void => {
  const { name, message } = error as Error;
  if (name === "AbortError") return;
  const here = !(error instanceof FileFault); // and not in the cluster's fields, though the file may be called cluster.yaml
  const path = here ? pathOf(message) : "";
  batch(() => {
    trouble.value = message;
    if (path.startsWith("cluster")) open("cluster");
  });
  const isAsked = Object.hasOwn(draft.peek(), path.split(/[.[]/)[0]); // and not, say, in what is tried
  fault = isAsked ? { message, path, value: valueAt(draft.peek(), path), isSaid: true } : null;
  if (here) mark(message, "trouble", true);
};
export async function attempt(work: () => Promise<void>): Promise<void> {
  trouble.value = "";
  fault = null;
  unmark();
  try {
    await work();
  } catch (error) {
    say(error);
  }
}

const underWay = signal<ReadonlySet<string>>(new Set());
export const isUnderWay = (name: string): boolean => underWay.value.has(name);
/** Begin what a button asks for; pushed again while that is under way, it begins nothing. */
export async function once(name: string, work: () => Promise<void>): Promise<void> {
  if (underWay.peek().has(name)) return;
  underWay.value = new Set([...underWay.peek(), name]);
  try {
    await work();
  } finally {
    underWay.value = new Set([...underWay.peek()].filter((other) => other !== name));
  }
}

// The open plan

let known: Promise<Data> = Promise.resolve();
let loaded = "";
let plans = new AbortController();
/** Open a plan; `stays`: without what it was asked for. */
async function load(id: string, stays: boolean): Promise<void> {
  plans.abort();
  pricing.abort();
  const { signal: gone } = (plans = new AbortController());
  loaded = id;
  limits.value = assumed.value = null;
  // Unless it is here or would cost what was written here.
  arriving.value = id !== "" && !stays && !isOfSearch(id) && !changed.peek();
  if (!id) {
    row.value = planned.value = shown.value = null;
    return;
  }
  loading.value = true;
  const first = patiently(() => Promise.all([get(`/jobs/${id}`, gone), post(`/plans/${id}/view?bound=false`, {}, gone)]));
  const limiting = patiently(() => loadLimits(id, gone, first));
  limiting.catch(() => {}); // said once there is a plan
  try {
    const [found, seen] = await first;
    batch(() => {
      row.value = found;
      planned.value = seen;
      shown.value = tried.value ? null : seen; // what is tried on it is priced first: another plan's figures are not its own
      pricedWith.value = NOTHING;
      loading.value = false;
    });
    if (tried.value) void reprice();
    void limiting.catch(say);
    if (arriving.value) await followAskedOf(id, gone);
  } catch (error) {
    if ((error as Error).name === "AbortError") return;
    const other = (error as Data).status === 404 ? await get(`/jobs/${id}`, gone).catch(() => null) : null;
    if (gone.aborted) return;
    const before = row.peek()?.id; // who comes from a plan is not left without any
    batch(() => {
      loading.value = arriving.value = false;
      row.value = planned.value = shown.value = null;
      planId.value = before && before !== id ? before : "";
      if (!other || other.has_plan) trouble.value = (error as Data).status === 404 ? t("planGone", { id }) : `${id}: ${(error as Error).message}`;
    });
    if (other && !other.has_plan) openUnmade(other);
  }
}
/** An address of a plan may be that of a search, which goes on or has found none, or of a front. */
function openUnmade(it: Data): void {
  if (it.kind === "front") {
    sessionStorage.setItem("polygon-front", it.id);
    view.value = "front";
  } else if (running(it)) jobId.value = it.id;
  else void attempt(async () => {
    if (!planId.peek() && !isOfSearch(it.id) && !changed.peek()) await takeAskedOf(it.id);
    trouble.value = ended(it);
  });
}
const MOST_ANEW = 3;
// The limits as they are found, then the bound; what planning anew would bring comes after: of what nobody gave, then of
// the first limits.
async function loadLimits(id: string, gone: AbortSignal, first: Promise<unknown>): Promise<void> {
  anew.value = {};
  await events(`/plans/${id}/limits/events`, gone, (now) => { if (!gone.aborted) limits.value = now; });
  const found = limits.value;
  await first;
  const seen = await post(`/plans/${id}/view`, {}, gone);
  if (gone.aborted) return;
  batch(() => {
    planned.value = seen;
    if (!tried.value) shown.value = seen;
  });
  if (gone.aborted || !found?.whole) return;
  const links = await get(`/plans/${id}/assumed`, gone);
  if (gone.aborted) return;
  assumed.value = links;
  for (let i = 0; i < Math.min(MOST_ANEW, found.limits.length); i++) {
    const answer = await get(`/plans/${id}/limits/${i}`, gone);
    if (!gone.aborted) anew.value = { ...anew.value, [i]: answer };
  }
}
/** Once the rail, which shows it, has what it chooses from. */
const askedOf = async (id: string, gone?: AbortSignal): Promise<Data> => (await Promise.all([get(`/jobs/${id}/request`, gone), known]))[0];
/** Take over what a plan, or a search without one, was asked for; whether it was, and nothing else was chosen meanwhile. */
export async function takeAskedOf(id: string): Promise<boolean> {
  let taken = false;
  await onceHere("whole", askedOf(id), (wanted) => { take(wanted, id); taken = true; });
  return taken;
}
/** Take it over where somebody comes to a plan or a search, unless something is asked here meanwhile. */
async function followAskedOf(id: string, gone: AbortSignal): Promise<void> {
  const before = draft.peek();
  const wanted = await patiently(() => askedOf(id, gone));
  batch(() => {
    if (draft.peek() === before && !awaits()) take(wanted, id);
    arriving.value = false;
  });
}
/** Why a search has no plan. */
export const ended = (it: Data): string => (!it.error ? t("stoppedEarly") : it.state === "infeasible" ? t("infeasible", { why: it.error }) : t("failed", { why: it.error }));

let pricing = new AbortController();
const RESTED_MS = 300;
// The step at once; what no plan can beat, which other devices make long work, where the slider has come to rest.
async function reprice(): Promise<void> {
  pricing.abort();
  const { signal: gone } = (pricing = new AbortController());
  const id = planId.value, path = `/plans/${id}/view`, now = JSON.stringify(changes.value);
  try {
    const data = await patiently(() => post(`${path}?bound=false`, changes.value, gone));
    if (gone.aborted || !data) return;
    batch(() => { shown.value = data; pricedWith.value = now; trouble.value = ""; });
    await new Promise((resolve) => setTimeout(resolve, RESTED_MS));
    const whole = gone.aborted ? null : await patiently(() => post(path, changes.value, gone));
    if (!gone.aborted && whole) shown.value = whole;
  } catch (error) {
    if (gone.aborted) return;
    if ((error as Data).status === 404) return forgotten(id);
    if (!shown.peek()) changes.value = {}; // as an address said it: the plan itself is shown
    say(error);
  }
}
/** The open plan was deleted, in another window say: it is open no more, and the list is without it. */
function forgotten(id: string): void {
  batch(() => {
    planId.value = "";
    changes.value = {};
    trouble.value = t("planGone", { id });
  });
  void loadJobs().catch(say);
}
let moving = 0;
function scheduleReprice(): void {
  clearTimeout(moving);
  moving = window.setTimeout(() => {
    if (loading.value) return; // priced once the plan is here
    if (tried.value) return void reprice();
    pricing.abort();
    batch(() => { shown.value = planned.value; pricedWith.value = NOTHING; });
  }, 30);
}
export const setChanges = (next: Record<string, unknown>): void => {
  changes.value = next;
};
/** Try something on the open plan; undefined takes it back. */
export function tryOut(name: string, value: unknown): void {
  const next = { ...changes.value };
  if (value === undefined) delete next[name];
  else next[name] = value;
  changes.value = next;
}
export function openPlan(id: string, to: View = "overview"): void {
  go(() => {
    planId.value = id;
    changes.value = {};
    view.value = to;
  });
}

/** Make a plan and open it; who has gone elsewhere meanwhile stays there, and is told that it is in the list. */
export async function openMade(make: () => Promise<Data>, to?: View): Promise<void> {
  const from = address();
  const made = await make();
  await loadJobs();
  if (address() === from) openPlan(made.id, to);
  else notice.value = t("keptAs", { name: called(made, jobs.value) });
}

export async function copyLink(): Promise<void> {
  await copy(location.href);
  notice.value = t("linkCopied");
}
export async function savePlan(): Promise<void> {
  download("plan.json", JSON.stringify(await get(`/plans/${planId.value}`)), "application/json");
}

// Searches

const AGAIN_MS = 2000;
let again = 0, asks = 0;
export async function loadJobs(): Promise<void> {
  clearTimeout(again);
  const ask = ++asks;
  const found = await get("/jobs");
  if (ask !== asks) return; // asked again meanwhile: an older list would bring back what was deleted
  jobs.value = found;
  // What runs, here or in another window, says in the list how far it is.
  if (jobs.value!.some(running)) again = window.setTimeout(() => void patiently(loadJobs).catch(() => undefined), AGAIN_MS);
}
/** What a search is asked, with what was just chosen or typed into the file beside the fields.

    @throws Error where that has a fault: what is asked would not be what stands there. */
export async function requested(): Promise<Data> {
  let read = false;
  do {
    await arrived();
    read = await readFile();
  } while (awaits());
  if (read) return request();
  open("cluster");
  focusSoon("yaml");
  throw new Error(t("fileFirst"));
}
let following = new AbortController();
const MANY = 429;
export const search = (): Promise<void> => once("search", () => attempt(async () => {
  const wanted = await requested(), as = draft.value;
  const begun = await post("/jobs", wanted).catch(async (error: unknown) => {
    if ((error as Data).status === MANY) await loadJobs(); // those that wait may be another window's
    throw error;
  });
  takeAsked(begun.id, as);
  progress.value = begun;
  jobId.value = begun.id;
  await loadJobs();
}));
export const running = (it: Data): boolean => it?.state === "queued" || it?.state === "running";

/** Tell of a job or a run until it has ended; a server that ends begins its jobs again when it is back. */
export async function follow(path: string, stop: AbortSignal, tell: (row: Data) => void, goesOn = running): Promise<Data> {
  let last: Data = null;
  for (;;) {
    try {
      await events(`${path}/events`, stop, (data) => tell((last = data)));
      if (last && !goesOn(last)) return last;
    } catch (error) {
      if (stop.aborted || !(error instanceof TypeError)) throw error;
    }
    tell({ ...(last ?? { id: path.split("/").pop(), state: "running", progress: 0 }), note: t("unreachable") });
    await new Promise((resolve) => setTimeout(resolve, 1000));
    if (stop.aborted) throw new DOMException("", "AbortError");
  }
}
/** Seconds that a piece of work still takes, by the part that is done; from when it is first looked at. */
export function timeLeft(): (part: number) => number | null {
  let began: { s: number; part: number } | null = null;
  return (part) => {
    const now_s = performance.now() / 1e3;
    began ??= { s: now_s, part };
    const done = part - began.part;
    return done > 0.05 ? ((now_s - began.s) / done) * (1 - part) : null;
  };
}
/** What a running job says, and how long it still takes. */
export const workNote = (it: Data): string =>
  `${it.note || t(it.state === "queued" ? "state_queued" : "working")}${it.left_s > 1 && !isAway.value ? ` · ${t("left", { time: roundSeconds(Math.round(it.left_s)) })}` : ""}`;
async function followSearch(id: string): Promise<void> {
  following.abort();
  const { signal: gone } = (following = new AbortController());
  if (!id) {
    progress.value = null; // by Back, say: it goes on, as the list says
    return;
  }
  progress.value ??= { id, state: "running", progress: 0 }; // until the server says more
  const left = timeLeft();
  const tell = (it: Data): void => { progress.value = { ...it, left_s: left(it.progress) }; };
  try {
    // Begun elsewhere: what is asked there is shown here, unless that would cost what was written here.
    if (!isOfSearch(id) && !changed.value) await followAskedOf(id, gone);
    const last = await follow(`/jobs/${id}`, gone, tell);
    jobId.value = ""; // Back comes to where the search was begun, and not to its end again
    if (last.has_plan) openPlan(id, view.value === "cluster" ? "overview" : view.value);
    else trouble.value = ended(last);
    await loadJobs();
  } catch (error) {
    if ((error as Error).name !== "AbortError") batch(() => { progress.value = null; jobId.value = ""; say(error); });
  }
}
/** The job that was asked to stop: a search of a large cluster takes seconds to come to where it can. */
export const stopping = signal("");
export async function stopJob(job: string): Promise<void> {
  await attempt(async () => {
    stopping.value = job;
    await call("DELETE", `/jobs/${job}`).catch((error: unknown) => { stopping.value = ""; throw error; });
  });
}

const FIRST = "aws-regions";
/** Begin: read the address, then follow every change of it, by the user or by Back. */
export async function begin(): Promise<void> {
  read();
  addEventListener("popstate", read);
  addEventListener("hashchange", read);
  effect(() => {
    const now = address();
    if (!going && now !== location.hash) history.replaceState(null, "", now);
  });
  known = patiently(() => get("/catalogue"));
  const first = isNew && !planId.value && !jobId.value ? patiently(() => get(`/instances/${FIRST}`)).catch(() => null) : null;
  // In the middle of a search what is asked is that search's, and not that of the plan that was open when it began.
  let stays = jobId.value !== "";
  effect(() => {
    const id = planId.value;
    if (id !== loaded) void load(id, stays);
    stays = false;
  });
  const [all, cluster] = await Promise.all([known, first]);
  batch(() => {
    if (cluster) start(cluster);
    catalogue.value = all; // from here on the rail can be edited
  });
  effect(() => {
    void changes.value;
    if (planned.peek()) scheduleReprice();
  });
  effect(() => {
    const id = jobId.value;
    void language.value; // what it says of itself comes from the server
    untracked(() => void followSearch(id));
  });
  effect(() => {
    void language.value;
    untracked(() => void patiently(loadJobs).catch(say));
  });
}

// Runs

/** Keep logs or traces of a run beside the open plan, and show them. */
export async function openRun(files: Record<string, string>): Promise<void> {
  const first = Object.keys(files).find((name) => !/^(rank-\d+|plan)\./.test(name)) ?? "run";
  const name = first.replace(/\.\w+$/, "").toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 30) || "run";
  const from = address();
  const made = await post("/runs", { name, plan: planId.value, files });
  if (address() === from) go(() => { view.value = "runs"; runName.value = made.name; });
  else notice.value = t("keptAs", { name: made.name });
}
