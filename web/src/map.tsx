// The map: land at its true aspect, regions, and what crosses between them; pan, zoom, drag.

import { useComputed } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { geoDistance, geoMercator, type GeoProjection } from "d3-geo";
import { select } from "d3-selection";
import { zoom, zoomIdentity, type D3ZoomEvent, type ZoomTransform } from "d3-zoom";
import land, { WIDTH } from "virtual:land";
import type { Data } from "./api";
import { ink, regionColor, useColor } from "./colors";
import { brief, bytes, gbps, ms, percent } from "./format";
import { lit, pointed, selected } from "./state";
import { t } from "./strings";

type Point = [number, number];

export interface Place {
  name: string;
  latitude?: number;
  longitude?: number;
  devices: number;
  /** Of a plan; undefined: there is none. */
  used?: number;
}
export interface Way {
  a: string;
  b: string;
  bytes: [number, number];
  busy: number;
  latency_ms: number;
  gbps: number;
}
export const EARTH_KM = 6371;
export const kmBetween = (a: Point, b: Point): number => EARTH_KM * geoDistance(a, b);
const within = (x: unknown, most: number): boolean => typeof x === "number" && Math.abs(x) <= most; // of NaN false, too
/** Whether it has a place on earth. */
export const placed = (p: { latitude?: unknown; longitude?: unknown }): boolean => within(p.latitude, 90) && within(p.longitude, 180);

/** Both directions of the links of a plan as one way each. */
export function ways(links: Data[]): Way[] {
  const found = new Map<string, Way>();
  for (const l of links) {
    const forward = l.source < l.target;
    const [a, b] = forward ? [l.source, l.target] : [l.target, l.source];
    const moved = l.activation_bytes + l.gradient_bytes;
    const way = found.get(`${a}\n${b}`) ?? { a, b, bytes: [0, 0], busy: 0, latency_ms: l.latency_ms, gbps: l.bandwidth_gbps };
    way.bytes[forward ? 0 : 1] += moved;
    way.busy = Math.max(way.busy, l.busy);
    found.set(`${a}\n${b}`, way);
  }
  return [...found.values()];
}

const MOST_NORTH = 85; // a pole lies infinitely far up on a Mercator map
const northing = (latitude: number): number => Math.max(-MOST_NORTH, Math.min(MOST_NORTH, latitude));
// Regions without a place stand on a circle where none has one, else below the map's middle.
function points(places: Place[]): Point[] {
  return places.map((p, i) => {
    if (placed(p)) return [p.longitude!, northing(p.latitude!)];
    const turn = (2 * Math.PI * i) / places.length;
    return [-60 * Math.cos(turn), 32 * Math.sin(turn)];
  });
}

// How many times a map of the world may be enlarged: for regions in one place, and for some that lie close together.
const MOST_ONE = 3, MOST = 60;
const PAN = 60; // pixels an arrow key
// The cut of the map lies in the widest gap between regions, so that no pair is torn apart.
function project(at: Point[], width: number, height: number): GeoProjection {
  const x = at.map((p) => p[0]).sort((a, b) => a - b);
  let gap = -1, middle = 0;
  x.forEach((low, i) => {
    const high = i + 1 < x.length ? x[i + 1] : x[0] + 360;
    if (high - low > gap) { gap = high - low; middle = (low + high) / 2 + 180; }
  });
  const projection = geoMercator().rotate([x.length ? -middle : 0, 0]);
  const around = at.length ? at : [[-120, -35], [150, 60]] as Point[];
  const pad = 46, wide = Math.min(70, 0.16 * width); // room for names beside the outermost
  const shape = { type: "MultiPoint" as const, coordinates: around };
  projection.fitExtent([[wide, pad], [width - wide, height - pad]], shape);
  const apart = around.some((p) => kmBetween(p, around[0]) > 1);
  const most = ((apart ? MOST : MOST_ONE) * width) / (2 * Math.PI);
  if (!Number.isFinite(projection.scale()) || projection.scale() > most) {
    const centre = around.reduce((sum, p) => [sum[0] + p[0] / around.length, sum[1] + p[1] / around.length], [0, 0]) as Point;
    projection.scale(most).translate([0, 0]);
    const [px, py] = projection(centre) ?? [0, 0];
    projection.translate([width / 2 - px, height / 2 - py]);
  }
  return projection;
}

interface Props {
  places: Place[];
  links?: Data[];
  height: number;
  label: string;
  onSelect?: (name: string) => void;
  onMove?: (name: string, latitude: number, longitude: number) => void;
}

export function WorldMap({ places, links = [], height, label, onSelect, onMove }: Props): JSX.Element {
  const frame = useRef<SVGSVGElement>(null);
  const [width, setWidth] = useState(0);
  const [view, setView] = useState<ZoomTransform>(zoomIdentity);
  const zooming = useRef(zoom<SVGSVGElement, unknown>().scaleExtent([1 / MOST, MOST]));
  const [whole, setWhole] = useState(false);
  const dragged = useRef<string>("");
  // The browser tells the width once it has laid out the page, in a task of its own: to ask for it would make it do so in
  // the one that opens a plan. Then, in another, the land is drawn, and not before.
  useLayoutEffect(() => {
    const element = frame.current!;
    const watch = new ResizeObserver(([it]) => { setTimeout(() => setWidth(Math.round(it.contentRect.width))); });
    watch.observe(element);
    zooming.current
      .filter((e: Event) => !(e.target as Element).closest("[data-region]") && (e.type !== "wheel" || (e as WheelEvent).ctrlKey || (e as WheelEvent).metaKey))
      .on("zoom", (e: D3ZoomEvent<SVGSVGElement, unknown>) => setView(e.transform));
    select(element).call(zooming.current).on("dblclick.zoom", null);
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    if (places.length && width && !performance.getEntriesByName("first-chart").length) performance.mark("first-chart");
  }, [places.length, width]);
  const at = points(places);
  // What a plan does not use may lie far away; the map shows it on demand.
  const near = at.filter((_, i) => places[i].used);
  const fits = near.length > 0 && near.length < at.length;
  const fitted = fits && !whole;
  const key = places.map((p) => `${p.name} ${fitted && p.used ? 1 : 0}`).join("\n");
  // While a region is dragged the map stands still.
  const base = useMemo(() => project(fitted ? near : at, width || 760, height), [key, width, height]);
  const home = (): void => { select(frame.current!).call(zooming.current.transform, zoomIdentity); };
  const projection = useMemo(() => {
    const moved = geoMercator().rotate(base.rotate()).scale(base.scale() * view.k);
    const [x, y] = base.translate();
    return moved.translate([x * view.k + view.x, y * view.k + view.y]).clipExtent([[-20, -20], [width + 20, height + 20]]);
  }, [base, view, width, height]);
  const by = (factor: number): void => { select(frame.current!).call(zooming.current.scaleBy, factor); };
  // Arrows move the map below what has the focus in it.
  const pan = (e: KeyboardEvent): void => {
    const [x, y] = { ArrowLeft: [1, 0], ArrowRight: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[e.key] ?? [0, 0];
    if (!(x || y) || e.altKey || e.ctrlKey || e.metaKey) return;
    e.preventDefault();
    select(frame.current!).call(zooming.current.translateBy, (x * PAN) / view.k, (y * PAN) / view.k);
  };
  const where = new Map(places.map((p, i) => [p.name, at[i]]));
  const seen = ways(links).filter((w) => w.bytes[0] + w.bytes[1] > 0 && where.has(w.a) && where.has(w.b));
  const move = (e: PointerEvent, name: string): void => {
    const box = frame.current!.getBoundingClientRect();
    const found = projection.invert?.([e.clientX - box.left, e.clientY - box.top]);
    if (!found || !onMove) return;
    dragged.current = name;
    const round = (v: number): number => Math.round(v * 100) / 100;
    onMove(name, round(northing(found[1])), round(((found[0] + 540) % 360) - 180));
  };
  return (
    <div class="map" style={{ height: `${height}px` }} onKeyDown={pan}>
      <svg ref={frame} width="100%" height={height} role="group" aria-label={label} data-chart="map" style={{ background: places.every(placed) ? ink().sea : undefined }}>
        {width > 0 && places.every(placed) && <Land projection={projection} width={width} />}
        {width > 0 && <><Ways seen={seen} where={where} projection={projection} />
        <Regions places={places} at={at} projection={projection} width={width} height={height} seen={seen}
          onSelect={onSelect} onDrag={onMove && move} /></>}
      </svg>
      <div class="map-tools">
        <button type="button" aria-label={t("zoomIn")} onClick={() => by(1.6)}>+</button>
        <button type="button" aria-label={t("zoomOut")} onClick={() => by(1 / 1.6)}>−</button>
        {fits && <button type="button" aria-pressed={!whole} aria-label={t("zoomUsed")} title={t("zoomUsed")} onClick={() => { setWhole(false); home(); }}>◎</button>}
        <button type="button" aria-label={t("zoomAll")} title={t("zoomAll")} onClick={() => { setWhole(true); home(); }}>⤢</button>
      </div>
    </div>
  );
}

// A world narrower than the frame goes on beside itself, as does one that is turned.
function Land({ projection, width }: { projection: GeoProjection; width: number }): JSX.Element {
  const round = 2 * Math.PI * projection.scale(), [x, y] = projection.translate();
  const zero = x + (projection.rotate()[0] / 360) * round; // longitude 0
  const first = Math.ceil((-zero - round / 2) / round), last = Math.floor((width - zero + round / 2) / round);
  return (
    <g fill={ink().land} data-land>{Array.from({ length: last - first + 1 }, (_, i) => (
      <path key={first + i} d={land} transform={`translate(${zero + (first + i) * round} ${y}) scale(${round / WIDTH})`} />))}</g>
  );
}

function Ways({ seen, where, projection }: { seen: Way[]; where: Map<string, Point>; projection: GeoProjection }): JSX.Element {
  const most = Math.max(1, ...seen.map((w) => w.bytes[0] + w.bytes[1]));
  return <g>{seen.map((w) => <Arc key={`${w.a}\n${w.b}`} w={w} most={most} curve={bow(projection(where.get(w.a)!)!, projection(where.get(w.b)!)!)} />)}</g>;
}
function Arc({ w, most, curve }: { w: Way; most: number; curve: Bow }): JSX.Element {
  const id = `${w.a}\n${w.b}`;
  // Only what changes is drawn again.
  const dim = useComputed(() => lit.value !== null && !lit.value.way(w.a, w.b));
  const moved = w.bytes[0] + w.bytes[1];
  const size = 1.2 + 4 * Math.sqrt(moved / most);
  const heads = [w.bytes[0] > 0 ? 0.62 : null, w.bytes[1] > 0 ? -0.38 : null].filter((x): x is number => x !== null);
  const words = `${w.a} – ${w.b}: ${bytes(moved)}, ${t("inUse", { part: percent(w.busy) })}, ${gbps(w.gbps)}, ${ms(w.latency_ms)}`;
  return (
    <g class={dim.value ? "way dim" : "way"} style={{ color: useColor(w.busy) }}
      onPointerEnter={() => (pointed.value = { link: id })} onPointerLeave={() => (pointed.value = {})}>
      <path d={drawn(curve)} fill="none" stroke="currentColor" stroke-width={size} stroke-linecap="round" />
      <path d={drawn(curve)} fill="none" stroke="transparent" stroke-width="14"><title>{words}</title></path>
      {heads.map((part) => <Head key={part} curve={curve} part={part} size={size} />)}
    </g>
  );
}
// A way as a bow: the ends and the point that pulls it up.
type Bow = [Point, Point, Point];
function bow(a: Point, b: Point): Bow {
  const far = Math.hypot(b[0] - a[0], b[1] - a[1]);
  return [a, [(a[0] + b[0]) / 2, (a[1] + b[1]) / 2 - 0.22 * far], b];
}
const drawn = ([a, pull, b]: Bow): string => `M${a}Q${pull} ${b}`;
const along = ([a, pull, b]: Bow, x: number): Point => [0, 1].map((k) => (1 - x) ** 2 * a[k] + 2 * x * (1 - x) * pull[k] + x * x * b[k]) as Point;

function Head({ curve, part, size }: { curve: Bow; part: number; size: number }): JSX.Element {
  const x = Math.abs(part), step = part > 0 ? 0.01 : -0.01;
  const [p, q] = [along(curve, x - step), along(curve, x + step)];
  const turn = (Math.atan2(q[1] - p[1], q[0] - p[0]) * 180) / Math.PI;
  const r = 3 + 0.8 * size;
  return <path d={`M${-r} ${-r * 0.75}L${r} 0L${-r} ${r * 0.75}Z`} fill="currentColor" transform={`translate(${q[0]} ${q[1]}) rotate(${turn})`} />;
}

const said = (p: Place): string => (p.used === undefined ? `${p.devices}` : `${p.used}/${p.devices}`);
interface RegionProps {
  places: Place[];
  at: Point[];
  projection: GeoProjection;
  width: number;
  height: number;
  seen: Way[];
  onSelect?: (name: string) => void;
  onDrag?: (e: PointerEvent, name: string) => void;
}
function Regions({ places, at, projection, width, height, seen, onSelect, onDrag }: RegionProps): JSX.Element {
  const biggest = Math.max(1, ...places.map((p) => p.devices));
  const spots = places.map((p, i) => {
    const [x, y] = projection(at[i]) ?? [-99, -99];
    return { x, y, r: 4 + 5 * Math.sqrt(Math.max(0, p.devices) / biggest) };
  });
  const byName = new Map(places.map((p, i) => [p.name, spots[i]]));
  const passed = seen.flatMap((w) => {
    const [a, b] = [byName.get(w.a)!, byName.get(w.b)!], curve = bow([a.x, a.y], [b.x, b.y]);
    return Array.from({ length: 40 }, (_, k) => along(curve, (k + 0.5) / 40));
  });
  const labels = spread(places.map((p, i) => ({ ...spots[i], text: `${brief(p.name, 20)} ${said(p)}` })), passed, width, height);
  return <g>{places.map((p, i) => <Region key={p.name} p={p} color={regionColor(i)} spot={spots[i]} label={labels[i]} width={width} height={height} onSelect={onSelect} onDrag={onDrag} />)}</g>;
}
interface OneRegion extends Pick<RegionProps, "width" | "height" | "onSelect" | "onDrag"> {
  p: Place;
  color: string;
  spot: { x: number; y: number; r: number };
  label: Label | null;
}
function Region({ p, color, spot, label, width, height, onSelect, onDrag }: OneRegion): JSX.Element {
  const { x, y, r } = spot;
  const state = useComputed(() => lit.value?.regions.has(p.name) || (onDrag && selected.value === p.name));
  const light = state.value;
  const inside = x >= 0 && x <= width && y >= 0 && y <= height;
  return (
    <g data-region={p.name} class={light ? "region lit" : "region"} tabindex={inside ? 0 : -1} role="button"
      aria-label={`${brief(p.name, 20)} ${p.used === undefined ? t("nDevices", { n: p.devices }) : t("usedOf", { used: p.used, all: p.devices })}`}
      onPointerEnter={() => (pointed.value = { region: p.name })} onPointerLeave={() => (pointed.value = {})}
      onFocus={() => (pointed.value = { region: p.name })} onBlur={() => (pointed.value = {})}
      onClick={() => onSelect?.(p.name)} onKeyDown={(e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); onSelect?.(p.name); } }}
      onPointerDown={(e) => { if (onDrag) { e.currentTarget.setPointerCapture(e.pointerId); } }}
      onPointerMove={(e) => { if (onDrag && e.buttons === 1 && e.currentTarget.hasPointerCapture(e.pointerId)) onDrag(e, p.name); }}>
      <circle cx={x} cy={y} r={r} fill={color} fill-opacity={p.used ? 0.92 : p.used === 0 ? 0.12 : 0.45} stroke={color} stroke-width="1.5" />
      {p.used !== undefined && p.used > 0 && p.used < p.devices && <circle cx={x} cy={y} r={r + 2.5} fill="none" stroke={color} stroke-width="1" stroke-dasharray={`${(p.used / p.devices) * 2 * Math.PI * (r + 2.5)} 999`} />}
      {(label || light) && <text x={label?.x ?? x + r + 4} y={label?.y ?? y + 4} text-anchor={label?.anchor ?? "start"} class="map-label" aria-hidden="true">{brief(p.name, 20)} <tspan>{said(p)}</tspan></text>}
    </g>
  );
}
interface Label { x: number; y: number; anchor: "start" | "end" | "middle" }
// The width of a label as it is drawn.
let pen: CanvasRenderingContext2D | null = null;
function wide(text: string): number {
  if (!pen) {
    pen = document.createElement("canvas").getContext("2d")!;
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  }
  return pen.measureText(text).width;
}
// Each label beside its place, else over or under it, else at a corner of it: where it covers no other and as little as
// may be of the ways; none where there is no room. Who has the least room chooses first.
function spread(spots: { x: number; y: number; r: number; text: string }[], passed: Point[], width: number, height: number): (Label | null)[] {
  type Box = [number, number, number, number];
  const taken: { of: number; box: Box }[] = spots.map((s, of) => ({ of, box: [s.x - s.r, s.y - s.r, s.x + s.r, s.y + s.r] }));
  taken.push({ of: -1, box: [width - 42, height - 104, width, height] }); // the buttons
  const found: (Label | null)[] = spots.map(() => null);
  const near = (s: { x: number; y: number }): number => spots.filter((o) => Math.hypot(o.x - s.x, o.y - s.y) < 90).length;
  const order = spots.map((_, i) => i).sort((i, j) => near(spots[j]) - near(spots[i]));
  for (const i of order) {
    const s = spots[i], w = wide(s.text), h = 14, far = s.r + 5, corner = 0.7 * s.r + 3;
    const at = (x: number, y: number, anchor: Label["anchor"]): [Label, Box] => {
      const left = anchor === "start" ? x : anchor === "end" ? x - w : x - w / 2;
      return [{ x, y: y + 4, anchor }, [left - 1, y - h / 2, left + w + 1, y + h / 2]];
    };
    const tries = [
      at(s.x + far, s.y, "start"), at(s.x - far, s.y, "end"), at(s.x, s.y + s.r + 9, "middle"), at(s.x, s.y - s.r - 9, "middle"),
      ...[1, -1].flatMap((up) => [at(s.x + corner, s.y - up * (corner + 6), "start"), at(s.x - corner, s.y - up * (corner + 6), "end")]),
    ];
    const free = tries.filter(([, box]) => {
      const inside = box[0] > 0 && box[2] < width && box[1] > 0 && box[3] < height;
      return inside && !taken.some(({ of, box: o }) => of !== i && box[0] < o[2] && box[2] > o[0] && box[1] < o[3] && box[3] > o[1]);
    });
    const crossed = free.map(([, box]) => passed.filter(([x, y]) => x > box[0] - 2 && x < box[2] + 2 && y > box[1] - 2 && y < box[3] + 2).length);
    const best = free[crossed.indexOf(Math.min(...crossed))];
    if (!best) continue;
    taken.push({ of: spots.length, box: best[1] });
    found[i] = best[0];
  }
  return found;
}
export const UseScale = (): JSX.Element => (
  <span class="scale" aria-hidden="true">{t("linkUse")} <i style={{ background: `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map(useColor).join(",")})` }} /> 0–100&nbsp;%</span>
);
