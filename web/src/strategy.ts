// Strategy: the plan stage by stage, its reasons, alternatives, and why not otherwise.

import { copy, get, download, post, type Data } from "./api";
import { axis, draw, frame, ink, palette, tooltip } from "./charts";
import { h, into, table } from "./dom";
import { digits, gib, bytes, percent, runs, seconds, signed } from "./format";
import { follow, running } from "./jobs";
import { cards, headline } from "./map";
import { maybe, t } from "./strings";
import { state } from "./state";

function reasons(): string[] {
  const v = state.shown, e = v.estimate;
  // One micro-batch more or less is what division leaves over.
  const uneven = v.stages.map((s: Data) => [Math.min(...s.workers.map((w: Data) => w.share_low)), Math.max(...s.workers.map((w: Data) => w.share_high))]).filter(([low, high]: number[]) => high > low + 1);
  const tp = Math.max(...v.stages.flatMap((s: Data) => s.workers.map((w: Data) => w.tp)));
  const full = v.stages.flatMap((s: Data) => s.workers).reduce((a: Data, b: Data) => (b.peak_bytes / b.limit_bytes > a.peak_bytes / a.limit_bytes ? b : a));
  const used = v.links.filter((l: Data) => l.activation_bytes + l.gradient_bytes > 0);
  const modes = [...new Set(used.flatMap((l: Data) => [...(l.activation_bytes ? [l.activations] : []), ...(l.gradient_bytes ? [l.weight_gradients] : [])]))];
  return [
    t("reasonLimit", { what: e.limited_by }),
    t("reasonGap", { bound: seconds(e.lower_bound_s), step: seconds(e.step_s), gap: percent(e.gap) }),
    t("reasonStages", { stages: v.stages.length, widths: runs(v.stages.map((s: Data) => s.width)) }),
    ...(uneven.length ? [t("reasonShares", { ranges: [...new Set(uneven.map((r: number[]) => r.join("–")))].slice(0, 8).join(", ") })] : []),
    tp > 1 ? t("reasonTensor", { tp }) : t("reasonNoTensor"),
    ...(v.devices.used < v.devices.all ? [t("reasonIdle", { idle: v.devices.all - v.devices.used, all: v.devices.all })] : []),
    ...(modes.length ? [t("reasonPacking", { modes: modes.join(", "), bytes: bytes(v.traffic.cross_region_bytes) })] : []),
    ...(v.traffic.total_s > 0 ? [t("reasonHidden", { hidden: percent(v.traffic.hidden) })] : []),
    t("reasonMemory", { peak: gib(full.peak_bytes), limit: gib(full.limit_bytes), owner: full.memory_owner }),
  ];
}

const span = (values: number[]): string => { const low = Math.min(...values), high = Math.max(...values); return low === high ? String(low) : `${low} – ${high}`; };
function degrees(): HTMLElement {
  const stages = state.shown.stages;
  return cards([
    ["pipelineDegree", String(stages.length), t("pipelineNote")],
    ["dataDegree", span(stages.map((s: Data) => s.width)), t("dataNote")],
    ["tensorDegree", span(stages.flatMap((s: Data) => s.workers.map((w: Data) => w.tp))), t("tensorNote")],
  ]);
}

const AXES = ["computation", "communication", "memory", "scalability", "across"];
export function strategy(root: HTMLElement): void {
  const v = state.shown;
  const rows = v.stages.flatMap((s: Data, i: number) => s.workers.map((w: Data, k: number) => [
    k === 0 ? String(i) : "", k === 0 ? s.layers : "", w.region, h("span", { class: "whole" }, w.tp > 1 ? `${w.workers} × ${w.tp} ${w.device}` : `${w.workers} × ${w.device}`), w.share_low === w.share_high ? w.share_low : `${w.share_low}–${w.share_high}`, percent(w.busy),
    h("div", {}, h("div", { class: "bar", "aria-hidden": "true" }, h("i", { class: w.peak_bytes > w.limit_bytes ? "full" : undefined, style: `width:${Math.min(100, (100 * w.peak_bytes) / w.limit_bytes)}%` })), h("span", { class: "whole" }, `${gib(w.peak_bytes)} / ${gib(w.limit_bytes)}`)),
    k === 0 ? [s.zero ? `ZeRO-${s.zero}` : "", s.recompute !== "none" ? `${t("recompute")} ${s.recompute}` : ""].filter(Boolean).join(", ") : "",
  ]));
  root.replaceChildren(h("div", { class: "grid" },
    h("section", { class: "panel" }, headline()),
    h("section", { class: "panel" }, h("h2", {}, t("planTable")), degrees(), table(t("planTable"), [t("stage"), t("layers"), t("region"), t("workers"), t("share"), t("busy"), t("memory"), t("options")], rows, [4, 5]),
      h("div", { class: "row", style: "margin-top:10px" }, h("button", { type: "button", onclick: async () => download("plan.json", JSON.stringify(await get(`/api/plans/${state.planId}`)), "application/json") }, t("planFile")), h("button", { type: "button", id: "share", onclick: async () => { await copy(location.href); document.getElementById("share-note")!.textContent = t("linkCopied"); } }, t("shareLink")), h("span", { id: "share-note", class: "soft", role: "status" }))),
    h("section", { class: "panel" }, h("h2", {}, t("reasons")), h("ul", { class: "plain", id: "reasons" }, reasons().map((r) => h("li", {}, r))),
      h("h3", {}, t("assumed")), v.assumptions.length ? h("ul", { class: "plain", id: "assumed" }, v.assumptions.map((a: string) => h("li", {}, a))) : h("p", { class: "soft" }, t("nothingAssumed"))),
    h("section", { class: "panel half" }, h("h2", {}, t("radar")), frame("radar", t("radar"), 360), h("p", { class: "soft" }, t("axes")), h("p", { class: "soft" }, t("others"))),
    h("section", { class: "panel half" }, h("h2", {}, t("pareto")), frame("pareto", t("pareto"), 360), h("p", { class: "soft" }, t("paretoHint"))),
    h("section", { class: "panel" }, h("h2", {}, t("alternatives")), h("div", { id: "alternatives", "aria-live": "polite" }, t("computing"))),
    h("section", { class: "panel" }, h("h2", {}, t("whyNot")), h("p", { class: "soft" }, t("whyNotHint")), h("div", { id: "why-not", "aria-live": "polite" }))));
  const id = state.planId;
  into("why-not", get(`/api/plans/${id}/explanation`), (data) => { if (id === state.planId && state.view === "strategy") explanation(id, data); });
  into("alternatives", get(`/api/plans/${id}/alternatives`), (data) => { if (id === state.planId && state.view === "strategy") drawAlternatives(data); });
}
function drawAlternatives(data: Data): void {
  const colors = ink();
  const list = data.alternatives;
  draw("radar", {
    tooltip: tooltip(), legend: { bottom: 0, textStyle: { color: colors.text } },
    radar: { center: ["50%", "46%"], radius: innerWidth < 600 ? "46%" : "62%", indicator: AXES.map((a) => ({ name: maybe(`axis_${a}`), max: 1, min: 0 })), axisName: { color: colors.text }, splitArea: { show: false }, splitLine: { lineStyle: { color: colors.line } }, axisLine: { lineStyle: { color: colors.line } } },
    series: [{ type: "radar", data: list.map((a: Data, i: number) => ({ name: maybe(a.key), value: AXES.map((x) => Number(a.axes[x].toFixed(3))), lineStyle: { width: i === 0 ? 3 : 1.5, type: i === 0 ? "solid" : "dashed" }, areaStyle: i === 0 ? { opacity: 0.2 } : undefined })) }],
  });
  draw("pareto", {
    tooltip: { ...tooltip(), formatter: (p: Data) => `${maybe(p.data.key)}<br>${t("step")} ${seconds(p.value[0])}<br>${t("cost")} ${digits(p.value[1])}` },
    grid: { left: 64, right: 72, top: 30, bottom: 48 },
    xAxis: { type: "value", scale: true, name: `${t("step")} (s)`, nameLocation: "middle", nameGap: 28, ...axis() }, yAxis: { type: "value", scale: true, name: t("cost"), ...axis() },
    series: [{ type: "scatter", data: data.points.map((p: Data) => ({ key: p.key, value: [p.step_s, p.usd_per_step], symbolSize: p.key === "plan" ? 18 : 11, itemStyle: { color: p.best ? palette[p.key === "plan" ? 0 : 2] : "transparent", borderColor: palette[p.key === "plan" ? 0 : p.best ? 2 : 1], borderWidth: 2 } })), label: { show: true, position: "right", color: colors.text, formatter: (p: Data) => (p.data.key === "other" ? "" : maybe(p.data.key)) }, labelLayout: { hideOverlap: true } }],
  });
  const [own, ...rest] = list;
  const faster = rest.filter((a: Data) => a.step_s < own.step_s * (1 - 1e-6)).sort((a: Data, b: Data) => a.step_s - b.step_s)[0];
  document.getElementById("alternatives")?.replaceChildren(faster ? h("p", {}, t("fasterMet", { name: maybe(faster.key), step: seconds(faster.step_s) })) : "", table(t("alternatives"), [t("name"), t("step"), t("tokens"), t("cost"), t("devices"), t("stagesCount"), ...AXES.map((a) => maybe(`axis_${a}`))], list.map((a: Data) => [maybe(a.key), seconds(a.step_s), digits(a.tokens_per_s), digits(a.usd_per_step), a.devices, a.stages, ...AXES.map((x) => digits(a.axes[x], 2))]), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]));
}

// Why not otherwise: a job a plan; its answers as tables, and more time where there was none left.
const LIMITS_S = [30, 60, 180, 600];
let limit_s = 60;
function explanation(id: string, data: Data): void {
  const place = document.getElementById("why-not");
  if (!place) return;
  const run = async (): Promise<void> => {
    const asked = running(data) ? data : await post(`/api/plans/${id}/explanation`, { time_limit_s: limit_s });
    const row = await follow(asked.id, place);
    if (row && id === state.planId && state.view === "strategy") explanation(id, await get(`/api/plans/${id}/explanation`));
  };
  if (running(data)) return into("why-not", run(), () => undefined);
  const begin = (text: string): HTMLElement => h("div", { class: "row" },
    h("label", {}, t("atMostTime"), h("select", { id: "explain-limit", onchange: (e: Event) => (limit_s = Number((e.target as HTMLSelectElement).value)) }, LIMITS_S.map((s) => h("option", { value: String(s), selected: s === limit_s }, s < 60 ? t("forSeconds", { n: s }) : t("forMinutes", { n: s / 60 }))))),
    h("button", { type: "button", id: "explain", onclick: () => into("why-not", run(), () => undefined) }, text));
  const a = data.answers;
  if (!a) return place.replaceChildren(begin(t("whyNotStart")), data.error ? h("p", { class: "error" }, data.error) : "");
  const missing = [...a.left_out, ...(a.changes_left_out ? [t("changesLeftOut", { n: a.changes_left_out })] : [])];
  place.replaceChildren(...answers(a), ...(missing.length ? [h("p", { id: "left-out-ideas" }, t(data.state === "cancelled" ? "stoppedBefore" : "leftOutIdeas", { what: missing.join("; ") })), begin(t("whyNotMore"))] : []));
}
function answers(a: Data): HTMLElement[] {
  const change = (part: number | null): string => (part === null ? "—" : signed(part, percent));
  const ideas = (title: string, rows: Data[]): HTMLElement[] => rows.length === 0 ? [] : [h("h3", {}, title), table(title, [t("idea"), t("timeChange"), t("step"), t("cost"), t("whyNotReason")],
    rows.map((r) => [r.idea, r.possible ? change(r.slower_by) : t("impossible"), r.possible ? seconds(r.step_s) : "—", r.possible ? digits(r.usd) : "—", r.reason]), [1, 2, 3])];
  const felt = [...a.sensitivities].sort((x: Data, y: Data) => x.replanned - y.replanned);
  return [
    ...ideas(t("differentPlans"), a.different_plans), ...ideas(t("naiveIdeas"), a.alternatives.filter((r: Data) => r.naive)), ...ideas(t("rejectedIdeas"), a.alternatives.filter((r: Data) => !r.naive)),
    ...(felt.length === 0 ? [] : [h("h3", {}, t("betterCluster")), table(t("betterCluster"), [t("change"), t("samePlan"), t("replanned"), t("worth")], felt.map((s: Data) => [s.text, change(s.same_plan), change(s.replanned), signed(s.usd_per_hour, digits)]), [1, 2, 3]),
      h("p", { class: "soft" }, t("searchedHint", { step: seconds(a.searched_step_s) }))]),
  ];
}
