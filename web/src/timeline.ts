// Timeline: the predicted step, with waiting named, and a measured trace beside it.

import { get, post, download, type Data } from "./api";
import { axis, draw, frame, ink, isDark, palette, tooltip } from "./charts";
import { escape, h, into, table, upload } from "./dom";
import { brief, percent, roundSeconds, seconds } from "./format";
import { cards, legend } from "./map";
import { maybe, t } from "./strings";
import { state } from "./state";

const KINDS: Record<string, string> = { F: palette[0], B: palette[2], exposed: "#c2571a", reduce: "#e0a07c", bubble: "#c3cbd6", update: palette[3], send: "#7d8896" };
const colorOf = (kind: string): string => (kind === "bubble" && isDark() ? "#46566b" : KINDS[kind] ?? palette[4]);
// Part of a row's height, and how far below its middle: what lies beside the work is thin.
const TALL: Record<string, [number, number]> = { send: [0.16, 0.42], reduce: [0.16, 0.42], bubble: [0.35, 0] };
export function timeline(root: HTMLElement): void {
  const v = state.shown;
  root.replaceChildren(h("div", { class: "grid" },
    h("section", { class: "panel" }, h("h2", {}, t("gantt")),
      h("div", { class: "legend" }, legend(KINDS.F, t("forward")), legend(KINDS.B, t("backward")), legend(colorOf("bubble"), t("bubble")), legend(KINDS.exposed, t("exposed")), legend(KINDS.reduce, t("reduce")), legend(KINDS.update, t("update")), legend(KINDS.send, t("send")), h("label", {}, h("input", { type: "checkbox", id: "sends", checked: state.showSends, onchange: (e: Event) => { state.showSends = (e.target as HTMLInputElement).checked; timeline(root); } }), ` ${t("showSends")}`)),
      cards([["step", seconds(v.estimate.step_s)], ["bubbleShare", "…"], ["exposedShare", "…"], ["exposedTime", seconds(v.traffic.exposed_s)], ["efficiency", percent(v.traffic.efficiency)]]),
      h("div", { id: "gantt-place" }), h("p", { class: "soft" }, t("ganttHint")), h("p", { class: "soft", id: "left-out" }),
      h("div", { class: "row" }, h("button", { type: "button", onclick: async () => download("predicted-trace.json", JSON.stringify(await get(`/api/plans/${state.planId}/trace`)), "application/json") }, t("perfetto")),
        upload(t("loadTrace"), "measured-file", (text) => { const why = measure(text); if (why) document.getElementById("trace-error")!.textContent = why; else timeline(root); })),
      h("p", { id: "trace-error", class: "error", role: "alert" })),
    state.measured && h("section", { class: "panel" }, h("h2", {}, t("measured")), h("div", { id: "measured-place" })),
    h("section", { class: "panel" }, h("details", {}, h("summary", {}, t("workersTable")), h("div", { id: "busy-table" })))));
  const id = state.planId;
  into("gantt-place", post(`/api/plans/${id}/timeline${state.showSends ? "?messages=true" : ""}`, state.changes), (data) => {
    if (id !== state.planId || state.view !== "timeline") return;
    const drawn = data.workers.filter((w: Data) => w.drawn);
    gantt("gantt", "gantt-place", t("gantt"), drawn.map(rowName), place(data, drawn), data.step_s);
    for (const key of ["bubble", "exposed"]) document.querySelector(`[data-card=${key}Share] b`)!.textContent = percent(data[`${key}_share`]);
    document.getElementById("left-out")!.textContent = data.left_out ? t("leftOut", { n: data.left_out, all: data.workers.length }) : "";
    document.getElementById("busy-table")?.replaceChildren(table(t("workersTable"), [t("workers"), t("computeTime"), t("busy")], data.workers.map((w: Data) => [`S${w.stage}.${w.worker} · ${w.region} ${w.device}`, seconds(w.busy_s), percent(w.busy_s / data.step_s)]), [1, 2]));
  });
  if (state.measured) drawMeasured();
}
// Keep a measured trace; what is wrong with it where it is none.
function measure(text: string): string {
  try {
    const data = JSON.parse(text);
    if (!drawn(data).length) return t("noEvents");
    state.measured = data;
    return "";
  } catch (error) {
    return t("notJson", { why: (error as Error).message });
  }
}
const drawn = (trace: Data): Data[] => (Array.isArray(trace?.traceEvents) ? trace.traceEvents : []).filter((e: Data) => e.ph === "X" && MEASURED.has(e.cat));
const MEASURED = new Map([["compute", ""], ["reduce", "reduce"], ["exposed", "exposed"], ["update", "update"], ["send", "send"]]);
// Where a worker is, in as few letters as there is room for.
const rowName = (w: Data): string => `S${w.stage}.${w.worker} · ${innerWidth < 600 ? brief(w.region, 7) : `${brief(w.region, 16)} ${w.device}`}`;
function place(data: Data, drawn: Data[]): Data[] {
  const row = new Map<string, number>(drawn.map((w: Data, i: number) => [`${w.stage}/${w.worker}`, i]));
  // Bubbles first: what is thinner than a pixel must not be covered by them.
  const shown = data.intervals.sort((a: Data, b: Data) => Number(b[2] === "bubble") - Number(a[2] === "bubble"));
  return shown.map(([s, w, kind, name, a, b]: Data) => [row.get(`${s}/${w}`), a, b, kind === "compute" ? name[0] : kind, name]);
}
function drawMeasured(): void {
  const events = drawn(state.measured);
  const threads = new Map<string, string>((state.measured.traceEvents ?? []).filter((e: Data) => e.name === "thread_name").map((e: Data) => [`${e.pid}/${e.tid}`, `S${e.pid} · ${e.args.name}`]));
  const keys = [...new Set<string>(events.map((e: Data) => `${e.pid}/${e.tid}`))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const row = new Map(keys.map((k, i) => [k, i]));
  const start = Math.min(...events.map((e: Data) => e.ts));
  gantt("measured", "measured-place", t("measured"), keys.map((k) => threads.get(k) ?? k), events.slice(0, 20000).map((e: Data) => [row.get(`${e.pid}/${e.tid}`), (e.ts - start) / 1e6, (e.ts + e.dur - start) / 1e6, e.cat === "compute" ? e.name[0] : e.cat, e.name]));
}
// What a bar is: its kind, the micro-batch, and the stage that a message goes to.
function spoken(kind: string, name: string): string {
  const [, what, stage] = /([FB]\d+)(?:.* (\d+)$)?/.exec(name) ?? [];
  return [maybe(kind === "F" ? "forward" : kind === "B" ? "backward" : kind), what ?? "", stage ? `→ ${t("stage")} ${stage}` : ""].filter(Boolean).join(" ");
}
// Rows of intervals [row, begin, end, kind, name]; with the step's length, what no interval covers is bubble.
function gantt(name: string, parent: string, label: string, rows: string[], intervals: Data[], step_s = 0): void {
  const colors = ink();
  const narrow = innerWidth < 600;
  const data: Data[] = [...(step_s ? rows.map((_, i) => [i, 0, step_s, "bubble", null]) : []), ...intervals];
  document.getElementById(parent)?.replaceChildren(frame(name, label, Math.min(900, 110 + 24 * rows.length)));
  draw(name, {
    tooltip: { ...tooltip(), formatter: (p: Data) => p.value[4] === null ? t("bubble") : `${escape(spoken(p.value[3], String(p.value[4])))}<br>${seconds(p.value[1])} – ${seconds(p.value[2])} (${seconds(p.value[2] - p.value[1])})` },
    grid: { left: narrow ? 84 : 190, right: 20, top: 10, bottom: 72 },
    dataZoom: [{ type: "slider", xAxisIndex: 0, bottom: 8, height: 22, filterMode: "weakFilter", textStyle: { color: colors.soft }, borderColor: colors.line }, { type: "inside", xAxisIndex: 0, filterMode: "weakFilter", zoomOnMouseWheel: "ctrl" }, ...(rows.length > 33 ? [{ type: "slider", yAxisIndex: 0, right: 0, width: 14, startValue: 0, endValue: 32, showDetail: false }] : [])],
    xAxis: { type: "value", min: 0, max: Math.max(...data.map((d) => d[2])), ...axis({ axisLabel: { color: colors.soft, formatter: roundSeconds, hideOverlap: true, showMaxLabel: false } }) },
    yAxis: { type: "category", data: rows, inverse: true, ...axis({ axisLabel: { color: colors.soft, width: narrow ? 76 : 180, overflow: "truncate" } }) },
    series: [{ type: "custom", encode: { x: [1, 2], y: 0 }, data, progressive: 0, renderItem: (params: Data, api: Data) => {
      const low = api.coord([api.value(1), api.value(0)]), high = api.coord([api.value(2), api.value(0)]);
      const kind = data[params.dataIndex][3], [part, below] = TALL[kind] ?? [0.7, 0], row = api.size([0, 1])[1], tall = row * part;
      const x = Math.max(low[0], params.coordSys.x), end = Math.min(high[0], params.coordSys.x + params.coordSys.width);
      if (end < x) return undefined;
      return { type: "rect", shape: { x, y: low[1] - tall / 2 + row * below, width: Math.max(0.6, end - x), height: tall }, style: { fill: colorOf(kind), stroke: colors.panel, lineWidth: end - x > 4 ? 0.5 : 0 } };
    } }],
  });
}
