// The predicted step, a row a stage: bars where there is room for them, bands where there is none; zoom asks for more.

import { useComputed, useSignal, useSignalEffect } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { download, get, patiently, post, type Data } from "./api";
import { dark, ink, kindColors, regionColor } from "./colors";
import { percent, seconds, secondsTo } from "./format";
import { attempt, changes, lit, openRun, planId, pointed, shown } from "./state";
import { maybe, t } from "./strings";
import { WithoutTried } from "./summary";
import { Menu, Skeleton, Table, Upload } from "./ui";

const ROW = 26, AXIS = 22, LABEL = 168;
const SPOKEN: Record<string, string> = { F: "forward", B: "backward", exposed: "exposed", update: "update", other: "otherStage", reduce: "reduce", send: "send", idle: "bubble" };

export interface Window { from: number; to: number }

export function Timeline(): JSX.Element {
  const [data, setData] = useState<Data>(null);
  const [window_, setWindow] = useState<Window | null>(null);
  const [opened, setOpened] = useState<number[]>([]);
  const [sends, setSends] = useState(false);
  const [asTable, setAsTable] = useState(false);
  const [error, setError] = useState("");
  const step_s = shown.value.estimate.step_s;
  const what = JSON.stringify(changes.value);
  useEffect(() => setWindow(null), [planId.value, step_s]);
  useEffect(() => {
    const stop = new AbortController();
    const timer = setTimeout(() => {
      const parts = new URLSearchParams();
      if (window_) { parts.set("from_s", String(window_.from)); parts.set("to_s", String(window_.to)); }
      for (const stage of opened) parts.append("open", String(stage));
      if (sends) parts.set("messages", "true");
      patiently(() => post(`/plans/${planId.value}/timeline?${parts}`, changes.value, stop.signal))
        .then((found) => { if (!stop.signal.aborted) { setData(found); setError(""); } })
        .catch((e: Error) => { if (!stop.signal.aborted) setError(e.message); });
    }, data ? 90 : 0);
    return () => { clearTimeout(timer); stop.abort(); };
  }, [planId.value, what, window_?.from, window_?.to, opened.join(), sends]);
  const toggle = (stage: number): void => setOpened(opened.includes(stage) ? opened.filter((s) => s !== stage) : [...opened, stage]);
  const now = window_ ?? { from: 0, to: step_s };
  return (
    <section class="section" aria-label={t("gantt")}>
      <div class="section-head"><h2>{t("gantt")}</h2>
        {data && <span class="soft" id="shares">{t("shares", { bubble: percent(data.bubble_share), exposed: percent(data.exposed_share) })}</span>}
        <span class="grow" />
        {window_ && <button type="button" class="small" onClick={() => setWindow(null)}>{t("wholeStep")}</button>}
        <Menu label="⋯" id="timeline-menu" name={t("timelineMenu")}>{() => <>
          <label class="check"><input type="checkbox" id="sends" checked={sends} onChange={(e) => setSends(e.currentTarget.checked)} />{t("showSends")}</label>
          <button type="button" onClick={() => void attempt(async () => download("predicted-trace.json", JSON.stringify(await get(`/plans/${planId.value}/trace`)), "application/json"))}>{t("perfetto")}</button>
          <WithoutTried words="fileWithout" />
          <Upload label={t("openRun")} id="measured-file" many take={(texts) => void attempt(() => openRun(texts))} />
        </>}</Menu>
      </div>
      <Legend sends={sends} />
      {error && <p class="error" role="alert" id="trace-error">{error}</p>}
      {data ? <Rows name="gantt" label={t("gantt")} rows={data.rows} kinds={data.kinds} window={now} whole={step_s} opened={opened} toggle={toggle} setWindow={setWindow} /> : <Skeleton lines={5} />}
      {data && <details class="as-table" onToggle={(e) => setAsTable(e.currentTarget.open)}><summary>{t("workersTable")}</summary>{asTable && <Table label={t("workersTable")} head={[t("stage"), t("workers"), t("devices"), t("computeTime"), t("busy")]} numeric={[3, 4]}
        rows={data.rows.map((r: Data) => [String(r.stage), `${r.worker + 1} / ${r.width}`, `${r.device}${r.tp > 1 ? ` × ${r.tp}` : ""} · ${r.region}`, seconds(r.busy_s), percent(r.busy_s / data.step_s)])} />}</details>}
    </section>
  );
}

export function Legend({ sends }: { sends: boolean }): JSX.Element {
  const colors = kindColors();
  const kinds = ["F", "B", "idle", "exposed", "reduce", "update", ...(shown.value?.chunks > 1 ? ["other"] : []), ...(sends ? ["send"] : [])];
  return <span class="legend" aria-hidden="true">{kinds.map((kind) => <span key={kind}><i class="swatch" style={{ background: colors[kind], boxShadow: kind === "idle" ? `inset 0 0 0 1px ${ink().line}` : undefined }} />{maybe(SPOKEN[kind])}</span>)}</span>;
}

interface RowsProps {
  name: string;
  label: string;
  rows: Data[];
  kinds: string[];
  window: Window;
  whole: number;
  opened: number[];
  toggle?: (stage: number) => void;
  setWindow: (window: Window | null) => void;
  /** When the step ends, where the window may go on. */
  ends?: number;
  /** Names of the regions of the plan's cluster, in their order; unsaid, of the open plan. */
  regions?: string[];
}
export function Rows({ name, label, rows, kinds, window: now, whole, opened, toggle, setWindow, ends = whole, regions }: RowsProps): JSX.Element {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [width, setWidth] = useState(600);
  const [tip, setTip] = useState<{ x: number; y: number; text: string } | null>(null);
  const drag = useRef<{ x: number; from: number; to: number } | null>(null);
  const index = new Map<string, number>((regions ?? (shown.value?.regions ?? []).map((r: Data) => r.name)).map((r: string, i: number) => [r, i]));
  const place = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(Math.max(120, Math.floor(entry.contentRect.width))));
    watch.observe(place.current!);
    return () => watch.disconnect();
  }, []);
  const height = rows.length * ROW + AXIS;
  // What the pointer is on changes often: the bars are drawn once, and then lit or dimmed row by row.
  const bars = useMemo(() => drawn(width, height, rows, kinds, now, ends), [rows, width, now.from, now.to, dark.value]);
  const drawing = useSignal({ bars, rows });
  useEffect(() => { drawing.value = { bars, rows }; }, [bars]);
  useSignalEffect(() => show(canvas.current!, drawing.value.bars, drawing.value.rows, lit.value?.stages));
  const clamp = (from: number, to: number): void => {
    const length = Math.min(whole, Math.max(whole / 1e5, to - from));
    const start = Math.max(0, Math.min(whole - length, from));
    setWindow(length >= whole * 0.999 ? null : { from: start, to: start + length });
  };
  const zoom = (factor: number, part = 0.5): void => {
    const length = (now.to - now.from) * factor, at = now.from + (now.to - now.from) * part;
    clamp(at - length * part, at + length * (1 - part));
  };
  useEffect(() => {
    const wheel = (e: WheelEvent): void => {
      if (!e.ctrlKey && !e.metaKey) return;
      e.preventDefault();
      zoom(Math.exp(e.deltaY * 0.002), e.offsetX / width);
    };
    const element = canvas.current!;
    element.addEventListener("wheel", wheel, { passive: false });
    return () => element.removeEventListener("wheel", wheel);
  }, [now.from, now.to, width]);
  const key = (e: KeyboardEvent): void => {
    const step = (now.to - now.from) / 5;
    const act = { ArrowLeft: () => clamp(now.from - step, now.to - step), ArrowRight: () => clamp(now.from + step, now.to + step), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": () => setWindow(null) }[e.key];
    if (act) { e.preventDefault(); act(); }
  };
  const hover = (e: PointerEvent): void => {
    if (drag.current) {
      const moved = ((drag.current.x - e.clientX) / width) * (drag.current.to - drag.current.from);
      return clamp(drag.current.from + moved, drag.current.to + moved);
    }
    const r = Math.floor(e.offsetY / ROW), at = now.from + (e.offsetX / width) * (now.to - now.from);
    if (!rows[r] || at > ends) return setTip(null);
    pointed.value = { stage: rows[r].stage };
    setTip({ x: e.offsetX, y: (r + 1) * ROW, text: spoken(rows[r], kinds, at, (now.to - now.from) / width) });
  };
  return (
    <div class="gantt" data-chart={name}>
      <ul class="gantt-labels" style={{ width: `${Math.min(LABEL, innerWidth * 0.36)}px` }}>{rows.map((r, i) => (
        <RowLabel key={`${r.stage} ${r.worker}`} r={r} first={i === 0 || rows[i - 1].stage !== r.stage} opened={opened.includes(r.stage)} toggle={toggle} busy={r.busy_s / ends} color={index.has(r.region) ? regionColor(index.get(r.region)!) : undefined} />))}</ul>
      <div class="gantt-place" ref={place}>
        <canvas ref={canvas} style={{ width: `${width}px`, height: `${height}px` }} tabIndex={0} role="img" aria-label={`${label}: ${[now.from, now.to].map((s) => secondsTo(s, (now.to - now.from) / 100)).join(" – ")}`} aria-description={t("ganttHint")} onKeyDown={key}
          onPointerMove={hover} onPointerLeave={() => { setTip(null); pointed.value = {}; }}
          onPointerDown={(e) => { drag.current = { x: e.clientX, from: now.from, to: now.to }; canvas.current!.setPointerCapture(e.pointerId); }}
          onPointerUp={() => (drag.current = null)} onDblClick={(e) => zoom(0.25, e.offsetX / width)} />
        {tip && <div class="tip" style={{ left: `${Math.min(tip.x, width - 180)}px`, top: `${tip.y}px` }}>{tip.text}</div>}
      </div>
    </div>
  );
}

interface LabelProps { r: Data; first: boolean; opened: boolean; toggle?: (stage: number) => void; busy: number; color?: string }
function RowLabel({ r, first, opened, toggle, busy, color }: LabelProps): JSX.Element {
  const light = useComputed(() => lit.value?.stages.has(r.stage) === true);
  return (
    <li style={{ height: `${ROW}px` }} class={light.value ? "lit" : undefined} onPointerEnter={() => (pointed.value = { stage: r.stage })} onPointerLeave={() => (pointed.value = {})}>
      {toggle && r.width > 1 && first
        ? <button type="button" class="twist" aria-expanded={opened} aria-label={t("openStage", { stage: r.stage, n: r.width })} onClick={() => toggle(r.stage)}>{opened ? "▾" : "▸"}</button> : <span class="twist" />}
      {color && <i class="dot" style={{ background: color }} />}
      <span class="hidden">{`${t("stage")} ${r.stage}${r.width > 1 ? `, ${t("workerOf", { i: r.worker + 1, n: r.width })}` : ""}: ${r.device}${r.region ? ` · ${r.region}` : ""}; ${t("busy")} ${percent(busy)}`}</span>
      <b aria-hidden="true">{r.stage}</b> <span aria-hidden="true">{r.device}{r.width > 1 && !opened && toggle ? ` · 1/${r.width}` : ""}</span>
    </li>
  );
}

function spoken(row: Data, kinds: string[], at: number, near: number): string {
  const band = row.bands.find(([a, b]: number[]) => a <= at && at < b);
  if (band) {
    const idle = Math.max(0, 1 - band[2].reduce((x: number, y: number) => x + y, 0));
    const parts = [...band[2].map((part: number, i: number) => [kinds[i], part] as const), ["idle", idle] as const].filter(([, part]) => part > 0.005);
    return parts.map(([kind, part]) => `${maybe(SPOKEN[kind])} ${percent(part)}`).join(" · ");
  }
  const hit = row.bars.filter(([k, , a, b]: number[]) => k < kinds.indexOf("reduce") && a - near <= at && at <= b + near)[0];
  if (!hit) return t("bubble");
  const [k, m, a, b] = hit;
  return `${maybe(SPOKEN[kinds[k]])}${m >= 0 ? ` ${m}` : ""}: ${seconds(a)} + ${seconds(b - a)}`;
}

function show(canvas: HTMLCanvasElement, bars: HTMLCanvasElement, rows: Data[], stages: Set<number> | undefined): void {
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== bars.width) canvas.width = bars.width;
  if (canvas.height !== bars.height) canvas.height = bars.height;
  const pen = canvas.getContext("2d")!;
  pen.clearRect(0, 0, bars.width, bars.height);
  const copy = (top: number, bottom: number, alpha = 1): void => {
    pen.globalAlpha = alpha;
    if (bottom > top) pen.drawImage(bars, 0, top, bars.width, bottom - top, 0, top, bars.width, bottom - top);
  };
  const edge = (row: number): number => Math.round(row * ROW * ratio);
  if (stages) rows.forEach((row, r) => copy(edge(r), edge(r + 1), stages.has(row.stage) ? 1 : 0.45));
  copy(stages ? edge(rows.length) : 0, bars.height);
}

function drawn(width: number, height: number, rows: Data[], kinds: string[], now: Window, ends: number): HTMLCanvasElement {
  const ratio = devicePixelRatio || 1;
  const canvas = document.createElement("canvas");
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d")!;
  pen.scale(ratio, ratio);
  const colors = kindColors(), soft = ink();
  const x = (s: number): number => ((s - now.from) / (now.to - now.from)) * width;
  rows.forEach((row, r) => {
    const top = r * ROW + 4, tall = ROW - 9;
    pen.fillStyle = colors.idle;
    pen.fillRect(0, top, Math.max(0, Math.min(width, x(ends))), tall);
    for (const [a, b, parts] of row.bands) {
      let y = top + tall;
      parts.forEach((part: number, i: number) => {
        pen.fillStyle = colors[kinds[i]];
        y -= part * tall;
        pen.fillRect(x(a), y, Math.max(1, x(b) - x(a)), part * tall);
      });
    }
    for (const [k, , a, b] of row.bars) {
      const left = Math.max(0, x(a)), right = Math.min(width, x(b));
      if (right < 0 || left > width) continue;
      pen.fillStyle = colors[kinds[k]];
      const beside = k >= kinds.indexOf("reduce");
      const gap = right - left > 5 ? 0.6 : 0;
      pen.fillRect(left, beside ? top + tall + 1 : top, Math.max(0.7, right - left - gap), beside ? 3 : tall);
    }
  });
  pen.fillStyle = soft.soft;
  pen.strokeStyle = soft.line;
  pen.font = "11px system-ui, sans-serif";
  const every = nice((now.to - now.from) / Math.max(3, width / 80));
  for (let s = Math.ceil(now.from / every) * every; s <= now.to; s += every) {
    const at = Math.round(x(s)) + 0.5;
    pen.beginPath();
    pen.moveTo(at, height - AXIS);
    pen.lineTo(at, height - AXIS + 4);
    pen.stroke();
    if (at < width - 36) pen.fillText(secondsTo(s, every), at + 3, height - 6);
  }
  return canvas;
}
function nice(value: number): number {
  const scale = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((x) => x * scale).find((x) => x >= value)!;
}
