// Configure: a cluster (shipped, uploaded or built by hand), a model, a batch, constraints; and the search itself.

import { get, post, type Data } from "./api";
import { draw, frame, ink } from "./charts";
import { constraintFields, constraints, fillLimits, writeWrong } from "./constraints";
import { choice, field, h, into, number, table, upload } from "./dom";
import { digits, moment } from "./format";
import { follow } from "./jobs";
import { maybe, t } from "./strings";
import { loadCatalogue, openPlan, state } from "./state";
import { km } from "./world";

let cluster: Data = null;
let model: Data = "gpt3-1.3b";
const form: Data = { instance: "", global_batch: 256, seq_len: 2048, precision: "bf16", optimizer: "adamw", objective: "time", effort: "quick", seed: 0 };
let job = "";
let filled = "";
let past: Data[] = [];
let redraw: () => void = () => undefined;
let opened: () => void = () => undefined;

export async function configure(root: HTMLElement, onOpen: () => void): Promise<void> {
  opened = onOpen;
  // Both at once: the first chart waits for the slower alone.
  const first = cluster ? null : get(`/api/instances/${FIRST}`).catch(() => null);
  await loadCatalogue();
  if (!cluster) {
    cluster = (await first) ?? emptyCluster();
    if (cluster.regions.length) form.instance = FIRST;
  }
  await fill().catch(() => undefined);
  redraw = () => {
    const kept = document.activeElement?.getAttribute("data-path");
    const said = document.getElementById("status");
    root.replaceChildren(page());
    if (said) status().replaceWith(said);
    mapChart();
    showEarlier();
    if (kept) root.querySelector<HTMLElement>(`[data-path="${CSS.escape(kept)}"]`)?.focus();
  };
  root.replaceChildren();
  redraw();
  loadEarlier();
  if (state.missing) { wrong(state.missing); state.missing = ""; }
  if (job) void attempt(wait);
}

// The form says what the open plan was asked for.
async function fill(): Promise<void> {
  if (!state.planId || filled === state.planId) return;
  const asked = (await get(`/api/plans/${state.planId}`)).problem;
  filled = state.planId;
  cluster = asked.cluster;
  form.instance = "";
  model = state.catalogue.models.some((m: Data) => m.name === asked.model.name) ? asked.model.name : asked.model;
  Object.assign(form, asked.batch);
  fillLimits(asked.constraints ?? {});
}

const FIRST = "aws-regions";
function emptyCluster(): Data {
  return { name: "mine", regions: [], latency_ms: [], bandwidth_gbps: [] };
}
const status = (): HTMLElement => document.getElementById("status")!;

function page(): HTMLElement {
  const names = state.catalogue.instances.map((n: string): [string, string] => [n, n]);
  return h("div", { class: "grid" },
    h("section", { class: "panel", "aria-labelledby": "h-cluster" }, h("h2", { id: "h-cluster" }, t("cluster")),
      h("div", { class: "fields" },
        choice(t("instance"), "instance", form.instance, [["", "—"], ...names], (name) => void attempt(async () => { form.instance = name; cluster = name ? await get(`/api/instances/${name}`) : emptyCluster(); redraw(); })),
        upload(t("upload"), "upload-cluster", (text, name) => void attempt(async () => { cluster = await post("/api/read", { kind: "cluster", text, name }); form.instance = ""; redraw(); }), t("uploadHint")),
        upload(t("openPlan"), "upload-plan", (text) => void attempt(async () => { const row = await post("/api/plans", JSON.parse(text)); await openPlan(row.id); opened(); })),
        h("button", { type: "button", onclick: () => { form.instance = ""; cluster = emptyCluster(); redraw(); } }, t("byHand")))),
    h("section", { class: "panel five", "aria-labelledby": "h-map" }, h("h2", { id: "h-map" }, t("regions")), frame("configure-map", t("regions"), 300), h("p", { class: "soft" }, t("mapHint")),
      h("div", { class: "row" }, choice(t("place"), "place", "", [["", "—"], ...state.catalogue.regions.map((r: Data): [string, string] => [r.name, r.name])], (name) => { const r = state.catalogue.regions.find((x: Data) => x.name === name); if (r) addRegion(r.name.toLowerCase(), r.latitude, r.longitude); }), h("button", { type: "button", onclick: () => addRegion(`region-${cluster.regions.length + 1}`) }, t("addRegion")))),
    h("section", { class: "panel seven", "aria-labelledby": "h-regions" }, h("h2", { id: "h-regions" }, t("devices")), regionTable()),
    cluster.regions.length > 1 && h("section", { class: "panel", "aria-labelledby": "h-links" }, h("h2", { id: "h-links" }, t("links")),
      h("div", { class: "row" }, h("button", { type: "button", onclick: suggest }, t("suggest"))), matrix("latency_ms", t("latency")), matrix("bandwidth_gbps", t("bandwidth")), distances()),
    h("section", { class: "panel", "aria-labelledby": "h-work" }, h("h2", { id: "h-work" }, t("work")), h("div", { class: "fields" },
      choice(t("model"), "model", typeof model === "string" ? model : model.name, [...(typeof model === "string" ? [] : [[model.name, model.name] as [string, string]]), ...state.catalogue.models.map((m: Data): [string, string] => [m.name, `${m.name} · ${digits(m.parameters / 1e9)} B`])], (name) => { const found = state.catalogue.models.find((m: Data) => m.name === name); if (found) { model = name; form.seq_len = found.tokens_per_image || Math.min(found.max_seq_len, form.seq_len || 2048); redraw(); } }),
      upload(t("uploadModel"), "upload-model", (text, name) => void attempt(async () => { model = await post("/api/read", { kind: "model", text, name }); redraw(); }), t("uploadModelHint")),
      field(t("globalBatch"), "batch.global_batch", form.global_batch, (v) => (form.global_batch = number(v)), { inputmode: "numeric" }),
      field(t("seqLen"), "batch.seq_len", form.seq_len, (v) => (form.seq_len = number(v)), { inputmode: "numeric" }),
      choice(t("precision"), "batch.precision", form.precision, ["bf16", "fp16", "fp32", "tf32", "fp8"].map((p): [string, string] => [p, p]), (v) => (form.precision = v)),
      choice(t("optimizer"), "batch.optimizer", form.optimizer, [["adamw", "AdamW"], ["sgd", "SGD"]], (v) => (form.optimizer = v)))),
    h("section", { class: "panel", "aria-labelledby": "h-limits" }, h("h2", { id: "h-limits" }, t("constraints")), constraintFields(cluster, redraw)),
    h("section", { class: "panel", "aria-labelledby": "h-search" }, h("h2", { id: "h-search" }, t("search")), h("div", { class: "fields" },
      choice(t("objective"), "objective", form.objective, ["time", "money", "energy", "tokens-per-usd"].map((o): [string, string] => [o, maybe(`objective_${o}`)]), (v) => (form.objective = v)),
      choice(t("effort"), "effort", form.effort, [["quick", t("quick")], ["thorough", t("thorough")], ["long", t("long")]], (v) => (form.effort = v)),
      field(t("seed"), "seed", form.seed, (v) => (form.seed = number(v))),
      h("button", { class: "main", id: "calculate", type: "button", onclick: () => void search() }, t("calculate"))),
      h("div", { id: "status", role: "status", "aria-live": "polite", style: "margin-top:10px" })),
    h("section", { class: "panel", "aria-labelledby": "h-earlier" }, h("h2", { id: "h-earlier" }, t("earlier")), h("div", { id: "earlier" })));
}

async function attempt(work: () => Promise<void>): Promise<void> {
  try { await work(); } catch (error) { wrong((error as Error).message); }
}

function wrong(message: string): void {
  writeWrong(status(), message);
}

function addRegion(name: string, latitude?: number, longitude?: number): void {
  const taken = new Set(cluster.regions.map((r: Data) => r.name));
  let own = name;
  for (let i = 2; taken.has(own); i++) own = `${name}-${i}`;
  cluster.regions.push({ name: own, ...(latitude === undefined ? {} : { latitude, longitude }), nodes: [{ device: "a100-40gb", count: 1, devices_per_node: 8 }] });
  for (const key of ["latency_ms", "bandwidth_gbps", "capacity_gbps"]) {
    if (!cluster[key] && key === "capacity_gbps") continue;
    cluster[key] ??= [];
    const n = cluster.regions.length;
    while (cluster[key].length < n) cluster[key].push([]);
    cluster[key].forEach((row: Data[], i: number) => { while (row.length < n) row.push(i === row.length ? null : key === "capacity_gbps" ? null : key === "latency_ms" ? guess(i, row.length) : 1); });
  }
  redraw();
}
function guess(a: number, b: number): number {
  const [p, q] = [cluster.regions[a], cluster.regions[b]];
  if (p.latitude === undefined || q.latitude === undefined) return 30;
  return Math.round((state.catalogue.latency_ms_floor + state.catalogue.latency_ms_per_km * km([p.longitude, p.latitude], [q.longitude, q.latitude])) * 10) / 10;
}
function suggest(): void {
  cluster.latency_ms.forEach((row: Data[], i: number) => row.forEach((value, j) => { if (i !== j && value !== null) row[j] = guess(i, j); }));
  redraw();
}
function removeRegion(r: number): void {
  cluster.regions.splice(r, 1);
  for (const key of ["latency_ms", "bandwidth_gbps", "capacity_gbps"]) if (cluster[key]) { cluster[key].splice(r, 1); cluster[key].forEach((row: Data[]) => row.splice(r, 1)); }
  redraw();
}

function regionTable(): HTMLElement {
  const rows: (HTMLElement | string)[][] = [];
  const cell = (label: string, path: string, value: Data, set: (v: string) => void, wide = false): HTMLElement => h("input", { value: value ?? "", title: wide ? value : undefined, class: wide ? "wide" : undefined, "aria-label": label, "data-path": path, onchange: (e: Event) => set((e.target as HTMLInputElement).value) });
  cluster.regions.forEach((region: Data, r: number) => region.nodes.forEach((node: Data, i: number) => {
    const at = `regions[${r}]`, where = `${region.name}: `;
    const place = (key: "latitude" | "longitude") => cell(where + t(key), `${at}.${key}`, region[key], (v) => { if (v.trim() === "") delete region[key]; else region[key] = number(v); mapChart(); });
    rows.push([
      i === 0 ? cell(`${t("region")} ${r + 1}: ${t("name")}`, `${at}.name`, region.name, (v) => (region.name = v), true) : "",
      h("select", { "aria-label": where + t("device"), "data-path": `${at}.nodes[${i}].device`, onchange: (e: Event) => { node.device = (e.target as HTMLSelectElement).value; delete node.intra_node; } }, [...new Set([node.device, ...state.catalogue.devices.map((d: Data) => d.name)])].map((d) => h("option", { value: d, selected: d === node.device }, d))),
      cell(where + t("nodes"), `${at}.nodes[${i}].count`, node.count, (v) => { node.count = number(v); mapChart(); }),
      cell(where + t("perNode"), `${at}.nodes[${i}].devices_per_node`, node.devices_per_node ?? 1, (v) => { node.devices_per_node = number(v); mapChart(); }),
      i === 0 ? place("latitude") : "", i === 0 ? place("longitude") : "",
      h("div", { class: "row" }, i === 0 && h("button", { type: "button", class: "small", "aria-label": where + t("addNodes"), onclick: () => { region.nodes.push({ device: "t4", count: 1, devices_per_node: 4 }); redraw(); } }, "+"),
        h("button", { type: "button", class: "small", "aria-label": where + t("remove"), onclick: () => { if (region.nodes.length > 1) { region.nodes.splice(i, 1); redraw(); } else removeRegion(r); } }, "×")),
    ]);
  }));
  return table(t("regions"), [t("name"), t("device"), t("nodes"), t("perNode"), t("latitude"), t("longitude"), ""], rows, [], { class: "edit" });
}

function matrix(key: string, label: string): HTMLElement {
  const names = cluster.regions.map((r: Data) => r.name);
  return h("details", { open: names.length <= 6 }, h("summary", {}, label), table(label, [`${t("from")} \\ ${t("to")}`, ...names], names.map((name: string, i: number) => [name, ...names.map((to: string, j: number) => i === j ? "—" : h("input", { "aria-label": `${label}: ${name} → ${to}`, "data-path": `${key}[${i}][${j}]`, value: cluster[key]?.[i]?.[j] ?? "", onchange: (e: Event) => { const v = (e.target as HTMLInputElement).value; cluster[key][i][j] = v.trim() === "" ? null : number(v); } }))])));
}

// Great-circle distances of what stands on the map.
function distances(): HTMLElement {
  const at = cluster.regions.map((r: Data) => [r.longitude, r.latitude]);
  const cell = (i: number, j: number): string => (i === j || ![...at[i], ...at[j]].every(Number.isFinite) ? "—" : Math.round(km(at[i], at[j])).toLocaleString("en-US"));
  const names = cluster.regions.map((r: Data) => r.name);
  return h("details", { open: names.length <= 6, id: "distances" }, h("summary", {}, t("distanceKm")), table(t("distanceKm"), ["", ...names], names.map((name: string, i: number) => [name, ...names.map((_: string, j: number) => cell(i, j))]), names.map((_: string, j: number) => j + 1)));
}

function mapChart(): void {
  const colors = ink();
  document.getElementById("distances")?.replaceWith(distances());
  const points = cluster.regions.filter((r: Data) => Number.isFinite(r.latitude) && Number.isFinite(r.longitude)).map((r: Data) => ({ name: r.name, value: [r.longitude, r.latitude, r.nodes.reduce((n: number, g: Data) => n + g.count * (g.devices_per_node ?? 1), 0)] }));
  const chart = draw("configure-map", {
    geo: { map: "world", roam: true, silent: true, left: 0, right: 0, top: 0, bottom: 0, itemStyle: { areaColor: colors.land, borderColor: colors.line } },
    series: [{ type: "scatter", coordinateSystem: "geo", data: points, symbolSize: 12, labelLayout: { hideOverlap: true }, label: { show: true, position: "bottom", distance: 2, color: colors.text, textBorderColor: colors.panel, textBorderWidth: 2, formatter: (p: Data) => `${p.name} (${p.value[2]})` } }],
  });
  chart?.getZr().off("click");
  chart?.getZr().on("click", (event) => {
    const at = chart.convertFromPixel("geo", [event.offsetX, event.offsetY]) as number[];
    if (at && Math.abs(at[0]) <= 180 && Math.abs(at[1]) <= 90) addRegion(`region-${cluster.regions.length + 1}`, Math.round(at[1] * 10) / 10, Math.round(at[0] * 10) / 10);
  });
}

function problem(): Data {
  const n = cluster.regions.length;
  const kept = { ...cluster, regions: cluster.regions };
  if (n < 2) { delete kept.latency_ms; delete kept.bandwidth_gbps; delete kept.capacity_gbps; }
  return {
    cluster: kept, model,
    batch: { global_batch: form.global_batch, seq_len: form.seq_len, precision: form.precision, optimizer: form.optimizer, ...(form.gradient_precision ? { gradient_precision: form.gradient_precision } : {}) },
    constraints: constraints(cluster),
  };
}

async function search(): Promise<void> {
  document.querySelectorAll(".field-error").forEach((e) => e.remove());
  document.querySelectorAll("[aria-invalid]").forEach((e) => e.removeAttribute("aria-invalid"));
  await attempt(async () => {
    const name = `${typeof model === "string" ? model : model.name} · ${cluster.name ?? "cluster"}`.slice(0, 120);
    job = (await post("/api/jobs", { problem: problem(), name, objective: form.objective, effort: form.effort, seed: form.seed })).id;
    await wait();
  });
}

// Follow the search that runs until it has ended; its plan opens.
async function wait(): Promise<void> {
  const row = await follow(job, status());
  if (!row || row.state === "queued" || row.state === "running") return;
  job = "";
  loadEarlier();
  if (row.state === "infeasible" || row.state === "failed") return wrong(`${t(row.state)}: ${row.error}`);
  if (!row.has_plan) return wrong(t("stoppedEarly"));
  filled = row.id;
  await openPlan(row.id);
  opened();
}

function loadEarlier(): void {
  into("earlier", get("/api/jobs"), (rows) => { past = rows; showEarlier(); });
}
function showEarlier(): void {
  const open = (row: Data): HTMLElement => h("button", { class: "small", type: "button", "aria-label": `${t("open")} ${row.name}`, onclick: () => void attempt(async () => { await openPlan(row.id); opened(); }) }, t("open"));
  document.getElementById("earlier")?.replaceChildren(past.length === 0 ? h("p", { class: "soft" }, t("noneYet")) : table(t("earlier"), [t("name"), t("made"), t("state"), t("step"), ""],
    past.slice(0, 12).map((row) => [h("span", { class: "name" }, row.name || row.id), moment(row.created_s, document.documentElement.lang), row.error ? `${maybe(row.state)}: ${row.error}` : maybe(`state_${row.state}`), row.has_plan ? row.note || "—" : "—", row.has_plan ? open(row) : ""]), [3]));
}
