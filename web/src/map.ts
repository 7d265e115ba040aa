// Training map: regions, links and what crosses them, routes of micro-batches, and the metrics of a step.

import type { Data } from "./api";
import { draw, frame, ink, palette, still, tooltip } from "./charts";
import { escape, h, table } from "./dom";
import { brief, bytes, digits, percent, seconds } from "./format";
import { t, type Key } from "./strings";
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
    ["devicesUsed", `${v.devices.used} / ${v.devices.all}`, `${t("stagesCount")}: ${v.stages.length}`],
    ["microBatches", `${v.micro_batches} × ${v.micro_batch_size}`, v.local_steps > 1 ? t("every", { n: v.local_steps }) : undefined],
  ]);
}

export function places(regions: Data[]): { at: [number, number][]; real: boolean } {
  const real = regions.every((r) => Number.isFinite(r.latitude) && Number.isFinite(r.longitude));
  return { real, at: regions.map((r, i) => (real ? [r.longitude, r.latitude] : regions.length === 1 ? [0, 0] : [-95 * Math.cos((2 * Math.PI * i) / regions.length), 55 * Math.sin((2 * Math.PI * i) / regions.length)])) };
}

let animate = !still();
export function trainingMap(root: HTMLElement): void {
  const v = state.shown;
  const { at, real } = places(v.regions);
  const busyLinks = v.links.filter((l: Data) => l.activation_bytes + l.gradient_bytes > 0).sort((a: Data, b: Data) => b.activation_bytes + b.gradient_bytes - a.activation_bytes - a.gradient_bytes);
  root.replaceChildren(h("div", { class: "grid" },
    h("section", { class: "panel" }, h("h2", {}, t("mapTitle")), !real && v.regions.length > 1 && h("p", { class: "soft" }, t("noPositions")),
      h("div", { class: "legend" }, legend(palette[0], t("ppTraffic")), legend(palette[1], `${t("dpTraffic")} – –`), legend(palette[3], t("tpTraffic")),
        h("label", {}, h("input", { type: "checkbox", id: "animate", checked: animate, onchange: (e: Event) => { animate = (e.target as HTMLInputElement).checked; drawMap(at, real); } }), ` ${t("animate")}`)),
      frame("map", `${t("mapTitle")}: ${v.regions.map((r: Data) => `${r.name} ${r.used}`).join(", ")}`, Math.max(300, Math.min(520, innerWidth * 0.5)))),
    h("section", { class: "panel" }, headline()),
    h("section", { class: "panel" }, h("h2", {}, t("linkTable")), busyLinks.length === 0 ? h("p", { class: "soft" }, t("noTraffic")) : table(t("linkTable"), [t("link"), t("distance"), t("latency"), t("bandwidth"), t("activations"), t("gradients"), t("busyLink")],
      busyLinks.map((l: Data) => [`${l.source} → ${l.target}`, l.distance_km === null ? "—" : `${digits(l.distance_km)} km`, digits(l.latency_ms), digits(l.bandwidth_gbps), bytes(l.activation_bytes), bytes(l.gradient_bytes), percent(l.busy)]), [1, 2, 3, 4, 5, 6]))));
  drawMap(at, real);
}
export function legend(color: string, text: string): HTMLElement {
  return h("span", {}, h("i", { class: "swatch", style: `background:${color}` }), text);
}
function drawMap(at: [number, number][], real: boolean): void {
  const v = state.shown, colors = ink();
  const index = new Map<string, number>(v.regions.map((r: Data, i: number) => [r.name, i]));
  const most = Math.max(...v.links.map((l: Data) => l.activation_bytes + l.gradient_bytes), 1);
  // Many lines are drawn thin and pale, so that the map is seen behind them.
  const crowd = Math.max(0.3, Math.min(1, 40 / v.links.filter((l: Data) => l.activation_bytes + l.gradient_bytes > 0).length));
  const path = (a: number, b: number): [number, number][][] => (real ? arc(at[a], at[b]) : [[at[a], at[b]]]);
  const lines = (key: string, color: string, dashed: boolean): object => ({
    type: "lines", coordinateSystem: "geo", polyline: true, z: dashed ? 4 : 3,
    data: v.links.filter((l: Data) => l[key] > 0).flatMap((l: Data) => path(index.get(l.source)!, index.get(l.target)!).map((coords) => ({ coords, link: l, lineStyle: { color, type: dashed ? [6, 5] : "solid", width: 1 + 4 * crowd * Math.sqrt(l[key] / most), opacity: 0.75 * crowd } }))),
  });
  const routes = v.routes.flatMap((route: number[]) => route.slice(1).flatMap((to, s) => (to === route[s] ? [] : path(route[s], to).map((coords) => ({ coords })))));
  const biggest = Math.max(...v.regions.map((r: Data) => r.used), 1);
  const spread = real ? bounds([...at, ...v.links.filter((l: Data) => l.activation_bytes + l.gradient_bytes > 0).flatMap((l: Data) => path(index.get(l.source)!, index.get(l.target)!).flat())]) : undefined;
  draw("map", {
    tooltip: { ...tooltip(), formatter: (p: Data) => { if (p.data.link) { const l = p.data.link; return `${escape(l.source)} → ${escape(l.target)}<br>${digits(l.latency_ms)} ms · ${digits(l.bandwidth_gbps)} Gbit/s${l.distance_km === null ? "" : ` · ${digits(l.distance_km)} km`}<br>${t("activations")} ${bytes(l.activation_bytes)} (${escape(l.activations)})<br>${t("gradients")} ${bytes(l.gradient_bytes)} (${escape(l.weight_gradients)})<br>${t("busyLink")} ${percent(l.busy)}`; } const r = p.data.region; return r ? `${escape(r.name)}<br>${Object.entries(r.devices).map(([d, n]) => `${n} × ${escape(d)}`).join("<br>")}<br>${t("devicesUsed")} ${r.used}<br>${t("stage")} ${r.stages.join(", ") || "—"}` : ""; } },
    geo: { map: real ? "world" : "blank", roam: true, silent: true, left: 0, right: 0, top: 10, bottom: 10, ...(spread ? { boundingCoords: spread } : {}), itemStyle: { areaColor: real ? colors.land : "transparent", borderColor: real ? colors.line : "transparent" }, emphasis: { disabled: true } },
    series: [
      lines("gradient_bytes", palette[1], true), lines("activation_bytes", palette[0], false),
      { type: "lines", coordinateSystem: "geo", polyline: true, silent: true, z: 5, data: animate ? routes : [], lineStyle: { opacity: 0, width: 1 }, effect: { show: animate, period: 4, symbolSize: 6, color: colors.text, trailLength: 0 } },
      { type: "scatter", coordinateSystem: "geo", z: 6, data: v.regions.map((r: Data, i: number) => ({ name: r.name, value: at[i], region: r, symbolSize: 12 + 22 * Math.sqrt(r.used / biggest), itemStyle: { color: r.used ? palette[2] : colors.soft, opacity: 0.9, borderColor: v.stages.some((s: Data) => s.workers.some((w: Data) => w.region === r.name && w.tp > 1)) ? palette[3] : colors.panel, borderWidth: 3 } })),
        label: { show: true, position: "bottom", color: colors.text, lineHeight: 15, formatter: (p: Data) => `${brief(p.data.region.name, innerWidth < 600 ? 16 : 32)}\n${p.data.region.used} / ${Object.values(p.data.region.devices as Record<string, number>).reduce((a, b) => a + b, 0)}`, textBorderColor: colors.panel, textBorderWidth: 3 }, labelLayout: { hideOverlap: true, moveOverlap: "shiftY" } },
    ],
  });
}
function bounds(at: [number, number][]): [[number, number], [number, number]] {
  const x = at.map((p) => p[0]), y = at.map((p) => p[1]);
  const pad = (low: number, high: number, least: number): [number, number] => { const more = Math.max(least - (high - low), (high - low) * 0.3) / 2; return [low - more, high + more]; };
  const [x0, x1] = pad(Math.min(...x), Math.max(...x), 30), [y0, y1] = pad(Math.min(...y), Math.max(...y), 18);
  return [[Math.max(-180, x0), Math.min(90, y1)], [Math.min(180, x1), Math.max(-75, y0)]];
}
