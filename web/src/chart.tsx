// A chart of ECharts in a frame with a name for screen readers.

import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import type { EChartsType } from "echarts/core";
import { part } from "./api";
import { dark, ink, palette } from "./colors";

// Reachable from tests, as what a canvas shows cannot be read otherwise.
const charts = new Map<string, EChartsType>();
(window as unknown as { polygonCharts: Map<string, EChartsType> }).polygonCharts = charts;

interface Props {
  name: string;
  label: string;
  height: number;
  // eslint-disable-next-line @typescript-eslint/no-explicit-any
  option: any;
  onClick?: (index: number) => void;
}
export function Chart({ name, label, height, option, onClick }: Props): JSX.Element {
  const place = useRef<HTMLDivElement>(null);
  const click = useRef(onClick);
  click.current = onClick;
  const latest = useRef(option); // what it shows may change while the library is loaded
  latest.current = option;
  useEffect(() => {
    const gone = new AbortController();
    let chart: EChartsType | undefined;
    const watch = new ResizeObserver(() => chart?.resize());
    // Loading, beginning and drawing in tasks of their own, chart after chart: the first of a visit would keep the page
    // for 120 ms.
    const begin = async (): Promise<void> => {
      const { init } = await part(() => import("./echarts"), gone.signal);
      await nextTask();
      if (gone.signal.aborted) return;
      chart = init(place.current!, undefined, { renderer: "canvas" });
      await nextTask();
      if (gone.signal.aborted) return;
      show(chart, latest.current);
      charts.set(name, chart);
      chart.on("click", (e) => click.current?.(e.dataIndex));
      watch.observe(place.current!);
    };
    turn = turn.then(begin).catch(() => undefined); // what a chart shows stands below it, too
    return () => {
      gone.abort();
      watch.disconnect();
      charts.delete(name);
      if (chart) leave(chart);
    };
  }, []);
  useEffect(() => { const chart = charts.get(name); if (chart) show(chart, option); }, [JSON.stringify(option), dark.value]);
  return <div ref={place} class="chart" role="img" aria-label={label} data-chart={name} style={{ height: `${height}px` }} />;
}
// What takes zrender more than 15 ms to paint it goes on with in the next frame, also on a chart that is gone by then
// (6.1: "Cannot read properties of null (reading 'layerStack')"): of a painting of another number nothing is left to do.
function leave(chart: EChartsType): void {
  (chart.getZr() as unknown as { painter: { _redrawId: number } }).painter._redrawId = NaN;
  chart.dispose();
}
let turn: Promise<void> = Promise.resolve();
const nextTask = (): Promise<void> => new Promise((done) => { setTimeout(done); });
// eslint-disable-next-line @typescript-eslint/no-explicit-any
function show(chart: EChartsType, option: any): void {
  chart.setOption({ animation: false, textStyle: { color: ink().text, fontFamily: getComputedStyle(document.body).fontFamily }, color: palette(), ...option }, true);
}
export function tooltip(): object {
  const { panel, line, text } = ink();
  return { confine: true, backgroundColor: panel, borderColor: line, textStyle: { color: text, fontSize: 12 } };
}
// eslint-disable-next-line @typescript-eslint/no-explicit-any
export function axis(more: any = {}): object {
  const { soft, line } = ink();
  const { axisLabel, ...rest } = more;
  return { axisLabel: { color: soft, hideOverlap: true, fontSize: 11, ...axisLabel }, nameTextStyle: { color: soft }, axisLine: { lineStyle: { color: line } }, splitLine: { lineStyle: { color: line, opacity: 0.6 } }, ...rest };
}
export const escape = (text: string): string => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
