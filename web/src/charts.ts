// ECharts with only what the page draws; every chart has a name for screen readers and is reachable from tests.

import { use, init, registerMap, type EChartsType } from "echarts/core";
import { BarChart, CustomChart, EffectScatterChart, HeatmapChart, LinesChart, RadarChart, ScatterChart } from "echarts/charts";
import { AriaComponent, DataZoomComponent, GeoComponent, GridComponent, LegendComponent, MarkLineComponent, RadarComponent, TooltipComponent, VisualMapComponent } from "echarts/components";
import { LabelLayout } from "echarts/features";
import { CanvasRenderer } from "echarts/renderers";
import { h } from "./dom";

use([BarChart, CustomChart, EffectScatterChart, HeatmapChart, LinesChart, RadarChart, ScatterChart, AriaComponent, DataZoomComponent, GeoComponent, GridComponent, LegendComponent, MarkLineComponent, RadarComponent, TooltipComponent, VisualMapComponent, LabelLayout, CanvasRenderer]);
export { registerMap };

export const charts = new Map<string, EChartsType>();
(window as unknown as { polygonCharts: Map<string, EChartsType> }).polygonCharts = charts;

export function isDark(): boolean {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
export const still = (): boolean => matchMedia("(prefers-reduced-motion: reduce)").matches;

export function ink(): { text: string; soft: string; line: string; land: string; panel: string } {
  return isDark()
    ? { text: "#e6ebf2", soft: "#a9b4c3", line: "#3a4656", land: "#263142", panel: "#182130" }
    : { text: "#18202b", soft: "#4d5a6b", line: "#c9d2de", land: "#dfe6ef", panel: "#ffffff" };
}
export const palette = ["#2f6fd0", "#c2571a", "#238556", "#8a4bbf", "#b8326a", "#0f7f92", "#8d6b00", "#5560c9", "#3f8f2f", "#a5453d"];

export function frame(name: string, label: string, height = 340): HTMLElement {
  return h("div", { class: "chart", id: `chart-${name}`, role: "img", "aria-label": label, style: `height:${height}px` });
}

// eslint-disable-next-line @typescript-eslint/no-explicit-any
export function draw(name: string, option: any): EChartsType | undefined {
  const element = document.getElementById(`chart-${name}`);
  if (!element) return undefined;
  let chart = charts.get(name);
  if (!chart || chart.getDom() !== element) {
    chart?.dispose();
    chart = init(element, undefined, { renderer: "canvas" });
    charts.set(name, chart);
    new ResizeObserver(() => chart && !chart.isDisposed() && chart.resize()).observe(element);
  }
  const colors = ink();
  if (!performance.getEntriesByName("first-chart").length) chart.on("rendered", function first() { chart!.off("rendered", first); performance.mark("first-chart"); });
  chart.setOption({ animation: false, textStyle: { color: colors.text, fontFamily: "inherit" }, color: palette, ...option }, true);
  return chart;
}

export function tooltip(): object {
  const colors = ink();
  return { confine: true, backgroundColor: colors.panel, borderColor: colors.line, textStyle: { color: colors.text } };
}
export function axis(more: object = {}): object {
  const colors = ink();
  return { axisLabel: { color: colors.soft, hideOverlap: true }, nameTextStyle: { color: colors.soft }, axisLine: { lineStyle: { color: colors.line } }, splitLine: { lineStyle: { color: colors.line, opacity: 0.5 } }, ...more };
}
