// Training map, strategy and timeline.

import { get, post, download, type Data } from "./api";
import { axis, draw, frame, ink, palette, still, tooltip } from "./charts";
import { escape, h, table } from "./dom";
import { bytes, digits, gib, percent, seconds } from "./format";
import { maybe, t, type Key } from "./strings";
import { state } from "./state";
import { arc } from "./world";

export function cards(list: [Key, string, string?][]): HTMLElement {
  return h("div", { class: "cards" }, list.map(([key, value, note]) => h("div", { class: "card", "data-card": key }, h("span", {}, t(key)), h("b", {}, value), note && h("small", {}, note))));
}
export function headline(): HTMLElement {
  const v = state.shown, e = v.estimate, f = v.traffic;
  const moved = f.dp_bytes + f.pp_bytes + f.tp_bytes;
  const weight = v.links.reduce((n: number, l: Data) => n + (l.activation_bytes + l.gradient_bytes) * (l.distance_km ?? 0), 0);
  return cards([
    ["step", seconds(e.step_s), `${t("interval")}: ${seconds(e.low_s)} – ${seconds(e.high_s)}`],
    ["tokens", digits(e.tokens_per_s), `${t("mfu")} ${percent(e.mfu)}`],
    ["bound", seconds(e.lower_bound_s), `${t("gap")} ${percent(e.gap)}`],
    ["cost", digits(e.cost_usd), `${t("energy")}: ${digits(e.energy_j / 3.6e6)} kWh`],
    ["computeTime", seconds(f.compute_s), `${t("efficiency")} ${percent(f.efficiency)}`],
    ["commTime", seconds(f.total_s), `${t("exposedTime")}: ${seconds(f.exposed_s)}`],
    ["volume", bytes(moved), `${t("across")}: ${bytes(f.cross_region_bytes)}`],
    ["crossFactor", percent(moved ? Math.min(1, f.cross_region_bytes / moved) : 0), weight && f.cross_region_bytes ? `${t("distanceFactor")}: ${digits(weight / f.cross_region_bytes)} km` : undefined],
    ["devicesUsed", `${v.devices.used} / ${v.devices.all}`, `${v.stages.length} ${t("stagesCount")}`],
    ["microBatches", `${v.micro_batches} × ${v.micro_batch_size}`],
  ]);
}

export function places(regions: Data[]): { at: [number, number][]; real: boolean } {
  const real = regions.every((r) => Number.isFinite(r.latitude) && Number.isFinite(r.longitude));
  return { real, at: regions.map((r, i) => (real ? [r.longitude, r.latitude] : [95 * Math.sin((2 * Math.PI * i) / regions.length), 55 * Math.cos((2 * Math.PI * i) / regions.length)])) };
}

let animate = !still();
export function trainingMap(root: HTMLElement): void {
  const v = state.shown;
  const { at, real } = places(v.regions);
  const busyLinks = v.links.filter((l: Data) => l.activation_bytes + l.gradient_bytes > 0).sort((a: Data, b: Data) => b.activation_bytes + b.gradient_bytes - a.activation_bytes - a.gradient_bytes);
  root.replaceChildren(h("div", { class: "grid" },
    h("section", { class: "panel" }, h("h2", {}, t("mapTitle")), !real && h("p", { class: "soft" }, t("noPositions")),
      h("div", { class: "legend" }, legend(palette[0], t("ppTraffic")), legend(palette[1], `${t("dpTraffic")} – –`), legend(palette[3], t("tpTraffic")),
        h("label", {}, h("input", { type: "checkbox", id: "animate", checked: animate, onchange: (e: Event) => { animate = (e.target as HTMLInputElement).checked; drawMap(at, real); } }), ` ${t("animate")}`)),
      frame("map", `${t("mapTitle")}: ${v.regions.map((r: Data) => `${r.name} ${r.used}`).join(", ")}`, Math.max(300, Math.min(520, innerWidth * 0.5)))),
    h("section", { class: "panel" }, headline()),
    h("section", { class: "panel" }, h("h2", {}, t("linkTable")), table(t("linkTable"), [t("link"), t("distance"), t("latency"), t("bandwidth"), t("activations"), t("gradients"), t("busy")],
      busyLinks.map((l: Data) => [`${l.source} → ${l.target}`, l.distance_km === null ? "—" : `${digits(l.distance_km)} km`, digits(l.latency_ms), digits(l.bandwidth_gbps), bytes(l.activation_bytes), bytes(l.gradient_bytes), percent(l.busy)]), [1, 2, 3, 4, 5, 6]))));
  drawMap(at, real);
}
function legend(color: string, text: string): HTMLElement {
  return h("span", {}, h("i", { class: "swatch", style: `background:${color}` }), text);
}
function drawMap(at: [number, number][], real: boolean): void {
  const v = state.shown, colors = ink();
  const index = new Map<string, number>(v.regions.map((r: Data, i: number) => [r.name, i]));
  const most = Math.max(...v.links.map((l: Data) => l.activation_bytes + l.gradient_bytes), 1);
  const path = (a: number, b: number): [number, number][][] => (real ? arc(at[a], at[b]) : [[at[a], at[b]]]);
  const lines = (key: string, color: string, dashed: boolean): object => ({
    type: "lines", coordinateSystem: "geo", polyline: true, z: dashed ? 4 : 3,
    data: v.links.filter((l: Data) => l[key] > 0).flatMap((l: Data) => path(index.get(l.source)!, index.get(l.target)!).map((coords) => ({ coords, link: l, lineStyle: { color, type: dashed ? [6, 5] : "solid", width: 1 + 4 * Math.sqrt(l[key] / most), opacity: 0.75 } }))),
  });
  const routes = v.routes.flatMap((route: number[]) => route.slice(1).flatMap((to, s) => (to === route[s] ? [] : path(route[s], to).map((coords) => ({ coords })))));
  const biggest = Math.max(...v.regions.map((r: Data) => r.used), 1);
  const spread = real ? bounds([...at, ...v.links.filter((l: Data) => l.activation_bytes + l.gradient_bytes > 0).flatMap((l: Data) => path(index.get(l.source)!, index.get(l.target)!).flat())]) : undefined;
  draw("map", {
    tooltip: { ...tooltip(), formatter: (p: Data) => { if (p.data.link) { const l = p.data.link; return `${escape(l.source)} → ${escape(l.target)}<br>${digits(l.latency_ms)} ms · ${digits(l.bandwidth_gbps)} Gbit/s${l.distance_km === null ? "" : ` · ${digits(l.distance_km)} km`}<br>${t("activations")} ${bytes(l.activation_bytes)} (${escape(l.activations)})<br>${t("gradients")} ${bytes(l.gradient_bytes)} (${escape(l.weight_gradients)})<br>${t("busy")} ${percent(l.busy)}`; } const r = p.data.region; return r ? `${escape(r.name)}<br>${Object.entries(r.devices).map(([d, n]) => `${n} × ${escape(d)}`).join("<br>")}<br>${t("devicesUsed")} ${r.used}<br>${t("stage")} ${r.stages.join(", ") || "—"}` : ""; } },
    geo: { map: real ? "world" : "blank", roam: true, silent: true, left: 0, right: 0, top: 10, bottom: 10, ...(spread ? { boundingCoords: spread } : {}), itemStyle: { areaColor: real ? colors.land : "transparent", borderColor: real ? colors.line : "transparent" }, emphasis: { disabled: true } },
    series: [
      lines("gradient_bytes", palette[1], true), lines("activation_bytes", palette[0], false),
      { type: "lines", coordinateSystem: "geo", polyline: true, silent: true, z: 5, data: animate ? routes : [], lineStyle: { opacity: 0, width: 1 }, effect: { show: animate, period: 4, symbolSize: 6, color: colors.text, trailLength: 0 } },
      { type: "scatter", coordinateSystem: "geo", z: 6, data: v.regions.map((r: Data, i: number) => ({ name: r.name, value: at[i], region: r, symbolSize: 12 + 22 * Math.sqrt(r.used / biggest), itemStyle: { color: r.used ? palette[2] : colors.soft, opacity: 0.9, borderColor: v.stages.some((s: Data) => s.workers.some((w: Data) => w.region === r.name && w.tp > 1)) ? palette[3] : colors.panel, borderWidth: 3 } })),
        label: { show: true, position: "bottom", color: colors.text, formatter: (p: Data) => `${p.data.region.name}\n${p.data.region.used} / ${Object.values(p.data.region.devices as Record<string, number>).reduce((a, b) => a + b, 0)}`, textBorderColor: colors.panel, textBorderWidth: 3 }, labelLayout: { hideOverlap: true, moveOverlap: "shiftY" } },
    ],
  });
}
function bounds(at: [number, number][]): [[number, number], [number, number]] {
  const x = at.map((p) => p[0]), y = at.map((p) => p[1]);
  const pad = (low: number, high: number, least: number): [number, number] => { const more = Math.max(least - (high - low), (high - low) * 0.3) / 2; return [low - more, high + more]; };
  const [x0, x1] = pad(Math.min(...x), Math.max(...x), 30), [y0, y1] = pad(Math.min(...y), Math.max(...y), 18);
  return [[Math.max(-180, x0), Math.min(85, y1)], [Math.min(180, x1), Math.max(-75, y0)]];
}

function reasons(): string[] {
  const v = state.shown, e = v.estimate;
  const shares = v.stages.flatMap((s: Data) => s.workers.flatMap((w: Data) => [w.share_low, w.share_high]));
  const tp = Math.max(...v.stages.flatMap((s: Data) => s.workers.map((w: Data) => w.tp)));
  const full = v.stages.flatMap((s: Data) => s.workers).reduce((a: Data, b: Data) => (b.peak_bytes / b.limit_bytes > a.peak_bytes / a.limit_bytes ? b : a));
  const used = v.links.filter((l: Data) => l.activation_bytes + l.gradient_bytes > 0);
  const modes = [...new Set(used.flatMap((l: Data) => [...(l.activation_bytes ? [l.activations] : []), ...(l.gradient_bytes ? [l.weight_gradients] : [])]))];
  return [
    t("reasonLimit", { what: e.limited_by }),
    t("reasonGap", { bound: seconds(e.lower_bound_s), step: seconds(e.step_s), gap: percent(e.gap) }),
    t("reasonStages", { stages: v.stages.length, widths: v.stages.map((s: Data) => s.width).join(" / ") }),
    ...(Math.max(...shares) > Math.min(...shares) ? [t("reasonShares", { low: Math.min(...shares), high: Math.max(...shares) })] : []),
    tp > 1 ? t("reasonTensor", { tp }) : t("reasonNoTensor"),
    ...(v.devices.used < v.devices.all ? [t("reasonIdle", { idle: v.devices.all - v.devices.used, all: v.devices.all })] : []),
    ...(modes.length ? [t("reasonPacking", { modes: modes.join(", "), bytes: bytes(v.traffic.cross_region_bytes) })] : []),
    t("reasonHidden", { hidden: percent(v.traffic.hidden) }),
    t("reasonMemory", { peak: gib(full.peak_bytes), limit: gib(full.limit_bytes), owner: full.memory_owner }),
  ];
}

const AXES = ["computation", "communication", "memory", "scalability", "across"];
export function strategy(root: HTMLElement): void {
  const v = state.shown;
  const rows = v.stages.flatMap((s: Data, i: number) => s.workers.map((w: Data, k: number) => [
    k === 0 ? String(i) : "", k === 0 ? s.layers : "", w.region, w.tp > 1 ? `${w.workers} × ${w.tp} ${w.device}` : `${w.workers} × ${w.device}`, w.share_low === w.share_high ? w.share_low : `${w.share_low}–${w.share_high}`, percent(w.busy),
    h("div", {}, h("div", { class: "bar", "aria-hidden": "true" }, h("i", { class: w.peak_bytes > w.limit_bytes ? "full" : undefined, style: `width:${Math.min(100, (100 * w.peak_bytes) / w.limit_bytes)}%` })), `${gib(w.peak_bytes)} / ${gib(w.limit_bytes)}`),
    k === 0 ? [s.zero ? `ZeRO-${s.zero}` : "", s.recompute !== "none" ? `${t("recompute")} ${s.recompute}` : ""].filter(Boolean).join(", ") : "",
  ]));
  root.replaceChildren(h("div", { class: "grid" },
    h("section", { class: "panel" }, headline()),
    h("section", { class: "panel" }, h("h2", {}, t("planTable")), table(t("planTable"), [t("stage"), t("layers"), t("region"), t("workers"), t("share"), t("busy"), t("memory"), t("options")], rows, [4, 5]),
      h("div", { class: "row", style: "margin-top:10px" }, h("button", { type: "button", onclick: async () => download("plan.json", JSON.stringify(await get(`/api/plans/${state.planId}`)), "application/json") }, t("planFile")), h("button", { type: "button", onclick: () => void navigator.clipboard?.writeText(location.href) }, t("shareLink")))),
    h("section", { class: "panel" }, h("h2", {}, t("reasons")), h("ul", { class: "plain", id: "reasons" }, reasons().map((r) => h("li", {}, r)))),
    h("section", { class: "panel half" }, h("h2", {}, t("radar")), frame("radar", t("radar"), 360), h("p", { class: "soft" }, t("axes"))),
    h("section", { class: "panel half" }, h("h2", {}, t("pareto")), frame("pareto", t("pareto"), 360), h("p", { class: "soft" }, t("paretoHint"))),
    h("section", { class: "panel" }, h("h2", {}, t("alternatives")), h("div", { id: "alternatives", "aria-live": "polite" }, t("working")))));
  const id = state.planId;
  void get(`/api/plans/${id}/alternatives`).then((data) => { if (id === state.planId && state.view === "strategy") drawAlternatives(data); });
}
function drawAlternatives(data: Data): void {
  const colors = ink();
  const list = data.alternatives;
  draw("radar", {
    tooltip: tooltip(), legend: { bottom: 0, textStyle: { color: colors.text } },
    radar: { center: ["50%", "46%"], radius: "62%", indicator: AXES.map((a) => ({ name: maybe(`axis_${a}`), max: 1, min: 0 })), axisName: { color: colors.text }, splitArea: { show: false }, splitLine: { lineStyle: { color: colors.line } }, axisLine: { lineStyle: { color: colors.line } } },
    series: [{ type: "radar", data: list.map((a: Data, i: number) => ({ name: maybe(a.key), value: AXES.map((x) => Number(a.axes[x].toFixed(3))), lineStyle: { width: i === 0 ? 3 : 1.5, type: i === 0 ? "solid" : "dashed" }, areaStyle: i === 0 ? { opacity: 0.2 } : undefined })) }],
  });
  draw("pareto", {
    tooltip: { ...tooltip(), formatter: (p: Data) => `${maybe(p.data.key)}<br>${t("step")} ${seconds(p.value[0])}<br>${t("cost")} ${digits(p.value[1])}` },
    grid: { left: 64, right: 24, top: 30, bottom: 48 },
    xAxis: { type: "value", scale: true, name: `${t("step")} (s)`, nameLocation: "middle", nameGap: 28, ...axis() }, yAxis: { type: "value", scale: true, name: t("cost"), ...axis() },
    series: [{ type: "scatter", data: data.points.map((p: Data) => ({ key: p.key, value: [p.step_s, p.usd_per_step], symbolSize: p.key === "plan" ? 18 : 11, itemStyle: { color: p.best ? palette[p.key === "plan" ? 0 : 2] : "transparent", borderColor: palette[p.key === "plan" ? 0 : p.best ? 2 : 1], borderWidth: 2 } })), label: { show: true, position: "right", color: colors.text, formatter: (p: Data) => (p.data.key === "other" ? "" : maybe(p.data.key)) }, labelLayout: { hideOverlap: true } }],
  });
  document.getElementById("alternatives")?.replaceChildren(table(t("alternatives"), [t("name"), t("step"), t("tokens"), t("cost"), t("devices"), t("stagesCount"), ...AXES.map((a) => maybe(`axis_${a}`))], list.map((a: Data) => [maybe(a.key), seconds(a.step_s), digits(a.tokens_per_s), digits(a.usd_per_step), a.devices, a.stages, ...AXES.map((x) => digits(a.axes[x], 2))]), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]));
}

const KINDS: Record<string, string> = { F: palette[0], B: palette[2], reduce: palette[1], update: palette[3], send: "#7d8896" };
export function timeline(root: HTMLElement): void {
  const v = state.shown;
  root.replaceChildren(h("div", { class: "grid" },
    h("section", { class: "panel" }, h("h2", {}, t("gantt")),
      h("div", { class: "legend" }, legend(KINDS.F, t("forward")), legend(KINDS.B, t("backward")), legend(KINDS.reduce, t("reduce")), legend(KINDS.update, t("update")), legend(KINDS.send, t("send")), h("label", {}, h("input", { type: "checkbox", id: "sends", checked: state.showSends, onchange: (e: Event) => { state.showSends = (e.target as HTMLInputElement).checked; timeline(root); } }), ` ${t("showSends")}`)),
      cards([["step", seconds(v.estimate.step_s)], ["bubble", percent(v.bubble)], ["exposedTime", seconds(v.traffic.exposed_s)], ["efficiency", percent(v.traffic.efficiency)]]),
      h("div", { id: "gantt-place" }), h("p", { class: "soft" }, t("ganttHint")), h("p", { class: "soft", id: "left-out" }),
      h("div", { class: "row" }, h("button", { type: "button", onclick: async () => download("predicted-trace.json", JSON.stringify(await get(`/api/plans/${state.planId}/trace`)), "application/json") }, t("perfetto")),
        h("label", {}, t("loadTrace"), h("input", { type: "file", id: "measured-file", onchange: async (e: Event) => { const file = (e.target as HTMLInputElement).files?.[0]; if (file) { state.measured = JSON.parse(await file.text()); timeline(root); } } })))),
    state.measured && h("section", { class: "panel" }, h("h2", {}, t("measured")), h("div", { id: "measured-place" })),
    h("section", { class: "panel" }, h("details", {}, h("summary", {}, t("workersTable")), h("div", { id: "busy-table" })))));
  const id = state.planId;
  void post(`/api/plans/${id}/timeline`, state.changes).then((data) => {
    if (id !== state.planId || state.view !== "timeline") return;
    gantt("gantt", "gantt-place", t("gantt"), data.workers.map((w: Data) => w.name), place(data));
    document.getElementById("left-out")!.textContent = data.left_out ? t("leftOut", { n: data.left_out }) : "";
    const busy = new Map<string, number>();
    for (const [s, w, kind, , a, b] of data.intervals) if (kind === "compute") busy.set(`${s}/${w}`, (busy.get(`${s}/${w}`) ?? 0) + b - a);
    document.getElementById("busy-table")?.replaceChildren(table(t("workersTable"), [t("workers"), t("computeTime"), t("busy")], data.workers.map((w: Data) => { const b = busy.get(`${w.stage}/${w.worker}`) ?? 0; return [w.name, seconds(b), percent(b / data.step_s)]; }), [1, 2]));
  });
  if (state.measured) drawMeasured();
}
function place(data: Data): Data[] {
  const row = new Map<string, number>(data.workers.map((w: Data, i: number) => [`${w.stage}/${w.worker}`, i]));
  return data.intervals.filter((i: Data) => state.showSends || i[2] !== "send").map(([s, w, kind, name, a, b]: Data) => [row.get(`${s}/${w}`), a, b, kind === "compute" ? name[0] : kind, name]);
}
function drawMeasured(): void {
  const events = (state.measured.traceEvents ?? []).filter((e: Data) => e.ph === "X" && ["compute", "reduce", "update", "send"].includes(e.cat));
  const threads = new Map<string, string>((state.measured.traceEvents ?? []).filter((e: Data) => e.name === "thread_name").map((e: Data) => [`${e.pid}/${e.tid}`, `S${e.pid} · ${e.args.name}`]));
  const keys = [...new Set<string>(events.map((e: Data) => `${e.pid}/${e.tid}`))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const row = new Map(keys.map((k, i) => [k, i]));
  const start = Math.min(...events.map((e: Data) => e.ts));
  gantt("measured", "measured-place", t("measured"), keys.map((k) => threads.get(k) ?? k), events.slice(0, 20000).map((e: Data) => [row.get(`${e.pid}/${e.tid}`), (e.ts - start) / 1e6, (e.ts + e.dur - start) / 1e6, e.cat === "compute" ? e.name[0] : e.cat, e.name]));
}
function gantt(name: string, parent: string, label: string, rows: string[], data: Data[]): void {
  const colors = ink();
  const narrow = innerWidth < 600;
  document.getElementById(parent)?.replaceChildren(frame(name, label, Math.min(900, 110 + 24 * rows.length)));
  draw(name, {
    tooltip: { ...tooltip(), formatter: (p: Data) => `${escape(String(p.value[4]))}<br>${seconds(p.value[1])} – ${seconds(p.value[2])} (${seconds(p.value[2] - p.value[1])})` },
    grid: { left: narrow ? 84 : 190, right: 20, top: 10, bottom: 72 },
    dataZoom: [{ type: "slider", xAxisIndex: 0, bottom: 8, height: 22, filterMode: "weakFilter", textStyle: { color: colors.soft }, borderColor: colors.line }, { type: "inside", xAxisIndex: 0, filterMode: "weakFilter", zoomOnMouseWheel: "ctrl" }, ...(rows.length > 33 ? [{ type: "slider", yAxisIndex: 0, right: 0, width: 14, startValue: 0, endValue: 32, showDetail: false }] : [])],
    xAxis: { type: "value", min: 0, max: Math.max(...data.map((d) => d[2])), ...axis({ axisLabel: { color: colors.soft, formatter: (x: number) => seconds(x), hideOverlap: true, showMaxLabel: false } }) },
    yAxis: { type: "category", data: rows, inverse: true, ...axis({ axisLabel: { color: colors.soft, width: narrow ? 76 : 180, overflow: "truncate" } }) },
    series: [{ type: "custom", encode: { x: [1, 2], y: 0 }, data, renderItem: (params: Data, api: Data) => {
      const low = api.coord([api.value(1), api.value(0)]), high = api.coord([api.value(2), api.value(0)]);
      const tall = api.size([0, 1])[1] * (data[params.dataIndex]?.[3] === "send" ? 0.25 : 0.7);
      const x = Math.max(low[0], params.coordSys.x), end = Math.min(high[0], params.coordSys.x + params.coordSys.width);
      if (end < x) return undefined;
      const kind = data[params.dataIndex][3];
      return { type: "rect", shape: { x, y: low[1] - tall / 2 + (kind === "send" ? tall * 1.2 : 0), width: Math.max(0.6, end - x), height: tall }, style: { fill: KINDS[kind] ?? palette[4], stroke: colors.panel, lineWidth: end - x > 4 ? 0.5 : 0 } };
    } }],
  });
}
