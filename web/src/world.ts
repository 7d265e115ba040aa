// The world's land without streaks at ±180°, and great circles cut there.

import { feature } from "topojson-client";
import land from "world-atlas/land-110m.json";
import { registerMap } from "./charts";

type Point = [number, number];

// Longitudes without jumps; a ring around a pole is closed over it.
function unwrapped(ring: Point[]): Point[] {
  const result: Point[] = [];
  let shift = 0;
  ring.forEach(([x, y], i) => {
    if (i > 0) {
      const step = x - ring[i - 1][0];
      if (step > 180) shift -= 360;
      else if (step < -180) shift += 360;
    }
    result.push([x + shift, y]);
  });
  const turn = result[result.length - 1][0] - result[0][0];
  if (Math.abs(turn) > 180) {
    const pole = result[0][1] < 0 ? -90 : 90;
    result.push([result[result.length - 1][0], pole], [result[0][0], pole], result[0]);
  }
  return result;
}

function clip(ring: Point[], border: number, keepBelow: boolean): Point[] {
  const inside = (p: Point): boolean => (keepBelow ? p[0] <= border : p[0] >= border);
  const result: Point[] = [];
  ring.forEach((p, i) => {
    const q = ring[(i + ring.length - 1) % ring.length];
    if (inside(p) !== inside(q)) result.push([border, q[1] + ((border - q[0]) / (p[0] - q[0])) * (p[1] - q[1])]);
    if (inside(p)) result.push(p);
  });
  return result;
}

export function cutRing(ring: Point[]): Point[][] {
  const whole = unwrapped(ring);
  const pieces: Point[][] = [];
  for (const shift of [-360, 0, 360]) {
    const moved = whole.map(([x, y]): Point => [x + shift, y]);
    const part = clip(clip(moved, 180, true), -180, false);
    if (part.length > 2) pieces.push([...part, part[0]]);
  }
  return pieces;
}

export function registerWorld(): void {
  // eslint-disable-next-line @typescript-eslint/no-explicit-any
  const shape = feature(land as any, (land as any).objects.land) as any;
  const polygons = (shape.type === "FeatureCollection" ? shape.features : [shape]).flatMap((f: { geometry: { coordinates: Point[][][] } }) => f.geometry.coordinates);
  const rings: Point[][][] = polygons.flatMap((polygon: Point[][]) => cutRing(polygon[0]).map((ring) => [ring]));
  // eslint-disable-next-line @typescript-eslint/no-explicit-any
  const file = (coordinates: Point[][][]): any => ({ type: "FeatureCollection", features: [{ type: "Feature", properties: { name: "land" }, geometry: { type: "MultiPolygon", coordinates } }] });
  registerMap("world", file(rings));
  registerMap("blank", file([[[[-180, -85], [-179.9, -85], [-179.9, -84.9], [-180, -85]]], [[[179.9, 84.9], [180, 84.9], [180, 85], [179.9, 84.9]]]]));
}

export function km(a: Point, b: Point): number {
  const [oa, la, ob, lb] = [a[0], a[1], b[0], b[1]].map((v) => (v * Math.PI) / 180);
  const s = Math.sin((lb - la) / 2) ** 2 + Math.cos(la) * Math.cos(lb) * Math.sin((ob - oa) / 2) ** 2;
  return 2 * 6371 * Math.asin(Math.min(1, Math.sqrt(s)));
}

// Points of the great circle from a to b, in pieces that do not cross ±180°.
export function arc(a: Point, b: Point, steps = 40): Point[][] {
  const rad = Math.PI / 180;
  const vector = ([x, y]: Point): number[] => [Math.cos(y * rad) * Math.cos(x * rad), Math.cos(y * rad) * Math.sin(x * rad), Math.sin(y * rad)];
  const [p, q] = [vector(a), vector(b)];
  const angle = Math.acos(Math.max(-1, Math.min(1, p[0] * q[0] + p[1] * q[1] + p[2] * q[2])));
  if (angle < 1e-6) return [[a, b]];
  const pieces: Point[][] = [[]];
  for (let i = 0; i <= steps; i++) {
    const [u, v] = [Math.sin((1 - i / steps) * angle) / Math.sin(angle), Math.sin((i / steps) * angle) / Math.sin(angle)];
    const [x, y, z] = [0, 1, 2].map((k) => u * p[k] + v * q[k]);
    const point: Point = [Math.atan2(y, x) / rad, Math.atan2(z, Math.hypot(x, y)) / rad];
    const piece = pieces[pieces.length - 1];
    const before = piece[piece.length - 1];
    if (before && Math.abs(point[0] - before[0]) > 180) {
      const side = before[0] > 0 ? 180 : -180;
      const next = point[0] + (before[0] > 0 ? 360 : -360);
      const middle = before[1] + ((side - before[0]) / (next - before[0])) * (point[1] - before[1]);
      piece.push([side, middle]);
      pieces.push([[-side, middle], point]);
    } else piece.push(point);
  }
  return pieces;
}
