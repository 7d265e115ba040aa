// Communication: volumes and times, the toggles that price the plan again at once, formulas, advice, sensitivities.

import { post, type Data } from "./api";
import { axis, draw, frame, ink, isDark, palette, tooltip } from "./charts";
import { escape, h, into, table } from "./dom";
import { brief, bytes, digits, gib, percent, roundBytes, seconds, signed } from "./format";
import { maybe, t, type Key } from "./strings";
import { reprice, state } from "./state";

const PACKINGS = ["none", "bf16", "int8", "int4", "topk", "powersgd"];
let timer = 0;
let slow = 0;

export function communication(root: HTMLElement): void {
  root.replaceChildren(h("div", { class: "grid" },
    h("section", { class: "panel" }, h("h2", {}, t("whatif")), controls(root), h("p", { id: "whatif-error", class: "error", role: "alert" })),
    h("section", { class: "panel" }, h("div", { id: "comm-cards", "aria-live": "polite" })),
    h("section", { class: "panel half" }, h("h2", {}, t("volumes")), frame("volumes", t("volumes"), 280), h("div", { id: "comm-volumes" })),
    h("section", { class: "panel half" }, h("h2", {}, t("heat")), h("p", { class: "soft", id: "heat-none" }), frame("heat", t("heat"), 340)),
    h("section", { class: "panel" }, h("h2", {}, t("advice")), h("div", { id: "advice" }, t("computing"))),
    h("section", { class: "panel" }, h("h2", {}, t("sensitivity")), h("div", { id: "sensitivities" }, t("computing"))),
    h("section", { class: "panel" }, h("h2", {}, t("formulas")), h("div", { id: "formulas" }), h("p", { class: "soft" }, t("symbols")))));
  show();
}

function change(name: string, value: unknown): void {
  if (value === undefined) delete state.changes[name];
  else state.changes[name] = value;
  clearTimeout(timer);
  timer = window.setTimeout(() => void update(), 30);
}
async function update(): Promise<void> {
  const error = document.getElementById("whatif-error");
  try {
    if (await reprice()) { if (error) error.textContent = ""; show(); }
  } catch (e) { if (error) error.textContent = (e as Error).message; }
}

function slider(key: Key, name: string, values: number[], now: number, off: number, text: (v: number) => string, take: (v: number) => void = (v) => change(name, v === off ? undefined : v)): HTMLElement {
  const at = Math.max(0, values.indexOf(now));
  const output = h("output", {}, text(values[at]));
  return h("label", {}, t(key), " ", output, h("input", { type: "range", min: 0, max: values.length - 1, step: 1, value: String(at), "data-change": name, "aria-valuetext": text(values[at]), oninput: (e: Event) => { const input = e.target as HTMLInputElement; const v = values[Number(input.value)]; output.textContent = text(v); input.setAttribute("aria-valuetext", text(v)); take(v); } }));
}
function select(key: Key, name: string, options: [string, string][], now: string, take: (v: string) => void): HTMLElement {
  return h("label", {}, t(key), h("select", { "data-change": name, onchange: (e: Event) => take((e.target as HTMLSelectElement).value) }, options.map(([v, text]) => h("option", { value: v, selected: v === now }, text))));
}
const times = (v: number): string => `× ${digits(v)}`;

function controls(root: HTMLElement): HTMLElement {
  const c = state.changes;
  const n = (name: string, fallback: number): number => (c[name] === undefined ? fallback : Number(c[name]));
  const packing = PACKINGS.map((p): [string, string] => [p, p]);
  const ofActivations = packing.filter(([p]) => p !== "powersgd");
  const used = state.planned.links.filter((l: Data) => l.activation_bytes + l.gradient_bytes > 0);
  const links = (c.links as Data[]) ?? [];
  const speeds: Record<string, number> = { ...((c.device_factors as Record<string, number>) ?? {}) };
  const types = [...new Set<string>(state.planned.regions.flatMap((r: Data) => Object.keys(r.devices)))].sort();
  const single = (kind: "activations" | "weight_gradients", v: string): void => {
    if (state.linkIndex === "") return change(kind, v || undefined);
    const l = used[Number(state.linkIndex)];
    const rest = links.filter((x) => !(x.source === l.source && x.target === l.target));
    const own = { ...(links.find((x) => x.source === l.source && x.target === l.target) ?? { source: l.source, target: l.target }) };
    if (v) own[kind] = v; else delete own[kind];
    const next = [...rest, ...(Object.keys(own).length > 2 ? [own] : [])];
    change("links", next.length ? next : undefined);
    (state.changes.links as Data[] | undefined) && links.splice(0, links.length, ...next);
  };
  const here = state.linkIndex === "" ? c : links.find((x) => x.source === used[Number(state.linkIndex)].source && x.target === used[Number(state.linkIndex)].target) ?? {};
  return h("div", {}, h("div", { class: "fields", id: "controls" },
    slider("accumulation", "accumulation", [1, 2, 4, 8, 16], n("accumulation", 1), 1, times),
    select("link", "link", [["", t("allLinks")], ...used.map((l: Data, i: number): [string, string] => [String(i), `${l.source} → ${l.target}`])], state.linkIndex, (v) => { state.linkIndex = v; communication(root); }),
    select("packActivations", "activations", [["", t("asPlanned")], ...ofActivations], String((here as Data).activations ?? ""), (v) => single("activations", v)),
    select("packGradients", "weight_gradients", [["", t("asPlanned")], ...packing], String((here as Data).weight_gradients ?? ""), (v) => single("weight_gradients", v)),
    slider("prefetch", "prefetch", [-1, 0, 0.25, 0.5, 1, 2, 4], n("prefetch", -1), -1, (v) => (v < 0 ? t("asPlanned") : times(v))),
    slider("localSteps", "local_steps", [1, 2, 4, 8, 16, 32, 64, 128], n("local_steps", state.planned.local_steps), state.planned.local_steps, digits),
    select("algorithm", "algorithm", ["hierarchical", "ring", "tree", "sharded-server", "central-server"].map((a): [string, string] => [a, maybe(a)]), String(c.algorithm ?? "hierarchical"), (v) => change("algorithm", v === "hierarchical" ? undefined : v)),
    slider("chunk", "chunk_mb", [0, 1, 4, 16, 64, 256], n("chunk_mb", 0), 0, (v) => (v ? `${v} MB` : t("whole"))),
    slider("streams", "streams", [0, 1, 2, 4, 8, 16], n("streams", 0), 0, (v) => (v ? digits(v) : t("enough"))),
    slider("overlap", "overlap", [0, 0.25, 0.5, 0.75, 1], n("overlap", 1), 1, (v) => `${v * 100} %`),
    slider("bwFactor", "bandwidth_factor", [0.1, 0.25, 0.5, 1, 2, 4, 10], n("bandwidth_factor", 1), 1, times),
    slider("latFactor", "latency_factor", [0.1, 0.25, 0.5, 1, 2, 4, 10], n("latency_factor", 1), 1, times),
    select("deviceType", "device", [["", t("allDevices")], ...types.map((d): [string, string] => [d, d])], state.deviceType, (v) => { state.deviceType = v; communication(root); }),
    slider("deviceSpeed", "device_factors", [0.5, 0.8, 1, 1.25, 1.5, 2, 4], Number(speeds[state.deviceType || types[0]] ?? 1), -1, times, (v) => { const next = { ...speeds }; for (const d of state.deviceType ? [state.deviceType] : types) if (v === 1) delete next[d]; else next[d] = v; change("device_factors", Object.keys(next).length ? next : undefined); Object.keys(speeds).forEach((k) => delete speeds[k]); Object.assign(speeds, next); }),
    slider("priceFactor", "price_factor", [0.25, 0.5, 1, 2, 4], n("price_factor", 1), 1, times),
    h("button", { type: "button", id: "reset", onclick: () => { state.changes = {}; state.linkIndex = state.deviceType = ""; communication(root); void update(); } }, t("reset"))));
}

function show(): void {
  const v = state.shown, f = v.traffic, p = state.planned;
  if (!document.getElementById("comm-cards")) return;
  const card = (key: Key, value: number, before: number, text: (x: number) => string): HTMLElement => h("div", { class: "card", "data-card": key }, h("span", {}, t(key)), h("b", {}, text(value)), Math.abs(value - before) > 1e-9 * Math.abs(before) && h("small", {}, `${t("before")}: ${text(before)}`));
  const g = p.traffic;
  document.getElementById("comm-cards")!.replaceChildren(h("div", { class: "cards" },
    card("step", v.estimate.step_s, p.estimate.step_s, seconds), card("tokens", v.estimate.tokens_per_s, p.estimate.tokens_per_s, digits), card("commTime", f.total_s, g.total_s, seconds), card("exposedTime", f.exposed_s, g.exposed_s, seconds), card("computeTime", f.compute_s, g.compute_s, seconds),
    card("hidden", f.hidden, g.hidden, percent), card("efficiency", f.efficiency, g.efficiency, percent), card("ratio", f.ratio, g.ratio, digits), card("across", f.cross_region_bytes, g.cross_region_bytes, bytes), card("cost", v.estimate.cost_usd, p.estimate.cost_usd, digits)),
    v.over_memory > 0 ? h("p", { class: "error" }, t("overMemory", { n: gib(v.over_memory) })) : "");
  drawVolumes(f, g);
  drawHeat(v);
  document.getElementById("formulas")!.replaceChildren(table(t("formulas"), [t("quantity"), t("formula"), t("numbers")], v.formulas.map((r: Data) => [maybe(`q_${r.key}`), r.formula, r.numbers])));
  const asked = state.asked;
  clearTimeout(slow);
  slow = window.setTimeout(() => more(asked), document.getElementById("advice")?.querySelector("details") ? 400 : 0);
}
// What takes longer to compute waits until nothing has moved for a moment.
function more(asked: number): void {
  into("advice", post(`/api/plans/${state.planId}/advice`, state.changes), (data) => { if (asked === state.asked) showAdvice(data); });
  into("sensitivities", post(`/api/plans/${state.planId}/sensitivities`, state.changes), (rows) => { const felt = rows.filter((r: Data) => r.saved_s > 1e-6 * state.shown.estimate.step_s); if (asked === state.asked) document.getElementById("sensitivities")?.replaceChildren(rows.length === 0 ? h("p", { class: "soft" }, t("noTraffic")) : felt.length === 0 ? h("p", { class: "soft" }, t("noGain")) : table(t("sensitivity"), [t("link"), t("better"), t("saves")], felt.map((r: Data) => [`${r.source} ↔ ${r.target}`, maybe(r.what), seconds(Math.max(0, r.saved_s))]), [2])); });
}
function drawVolumes(f: Data, g: Data): void {
  const colors = ink();
  const names = [t("ppTraffic"), t("dpTraffic"), t("tpTraffic")];
  const moved = (x: Data): number[] => [x.pp_bytes, x.dp_bytes, x.tp_bytes];
  draw("volumes", {
    tooltip: { ...tooltip(), valueFormatter: bytes }, legend: { bottom: 0, textStyle: { color: colors.text } }, grid: { left: 60, right: 16, top: 16, bottom: 64 },
    xAxis: { type: "category", data: names, ...axis({ axisLabel: { color: colors.soft, interval: 0, width: 110, overflow: "break" } }) }, yAxis: { type: "value", ...axis({ axisLabel: { color: colors.soft, formatter: roundBytes } }) },
    series: [{ name: t("before"), type: "bar", data: moved(g), itemStyle: { opacity: 0.45 } }, { name: t("whatif"), type: "bar", data: moved(f) }],
  });
  document.getElementById("comm-volumes")!.replaceChildren(table(t("volumes"), [t("dimension"), t("volume"), t("time")], [[names[0], bytes(f.pp_bytes), seconds(f.pp_s)], [names[1], bytes(f.dp_bytes), seconds(f.dp_s)], [names[2], bytes(f.tp_bytes), f.tp_bytes > 0 ? t("withinCompute") : seconds(0)]], [1, 2]));
}
function drawHeat(v: Data): void {
  const colors = ink();
  const names = v.regions.map((r: Data) => r.name);
  const index = new Map<string, number>(names.map((n: string, i: number) => [n, i]));
  const cells = v.links.map((l: Data) => [index.get(l.target), index.get(l.source), l.activation_bytes + l.gradient_bytes, l]);
  const most = Math.max(...cells.map((c: Data) => c[2]), 1);
  const short = (name: string): string => brief(name, 14);
  const none = cells.every((c: Data) => c[2] === 0);
  document.getElementById("heat-none")!.textContent = none ? t("noTraffic") : "";
  document.getElementById("chart-heat")!.hidden = none;
  if (!none) draw("heat", {
    tooltip: { ...tooltip(), formatter: (p: Data) => { const l = cells[p.dataIndex][3]; return `${escape(l.source)} → ${escape(l.target)}<br>${t("activations")} ${bytes(l.activation_bytes)} (${l.activations})<br>${t("gradients")} ${bytes(l.gradient_bytes)} (${l.weight_gradients})<br>${t("busyLink")} ${percent(l.busy)}`; } },
    grid: { left: 90, right: 20, top: 10, bottom: 92 },
    xAxis: { type: "category", data: names, name: t("to"), ...axis({ axisLabel: { color: colors.soft, rotate: 40, interval: 0, hideOverlap: false, formatter: short } }) }, yAxis: { type: "category", data: names, inverse: true, ...axis({ axisLabel: { color: colors.soft, interval: 0, formatter: short } }) },
    visualMap: { min: 0, max: most, show: true, text: [roundBytes(most), "0 B"], orient: "horizontal", left: "center", bottom: 0, itemHeight: 100, formatter: roundBytes, textStyle: { color: colors.soft }, inRange: { color: [colors.land, palette[0], isDark() ? "#cfe2ff" : "#0b2a5c"] } },
    series: [{ type: "heatmap", data: cells.map((c: Data) => c.slice(0, 3)), itemStyle: { borderColor: colors.panel, borderWidth: 1 } }],
  });
}
function showAdvice(data: Data): void {
  const place = document.getElementById("advice");
  place?.replaceChildren(h("p", {}, t("adviceCase", { case: t(`case_${data.case}` as Key), ratio: `${digits(data.ratio)} ×`, hidden: percent(data.hidden) })),
    ...(["balanced", "computation", "communication"] as const).map((kind) => h("details", { open: kind === data.case }, h("summary", {}, t(`case_${kind}`)), table(t(`case_${kind}`), [t("measure"), t("tokens"), t("step"), t("hiddenAfter"), ""], data.cases[kind].map((m: Data) => [
      maybe(`m_${m.key}`), signed(m.speedup, percent), seconds(m.step_s), percent(m.hidden), m.over_memory > 0 ? h("span", { class: "error" }, t("overMemory", { n: gib(m.over_memory) })) : h("button", { type: "button", class: "small", "aria-label": `${t("apply")}: ${maybe(`m_${m.key}`)}`, onclick: () => { Object.assign(state.changes, m.change); const root = document.getElementById("view")!; communication(root); void update(); } }, t("apply")),
    ]), [1, 2, 3]))));
}
