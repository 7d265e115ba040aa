// Links between regions that nobody gave: latency by distance, a placeholder for the rate, marked until somebody gives them.

import type { Data } from "./api";
import { guess, isGuessed, regionId, type Draft } from "./draft";
import { pathOf } from "./faults";
import { kmBetween, placed } from "./map";
import { catalogue, notice } from "./state";
import { t } from "./strings";

export const MATRICES = ["latency_ms", "bandwidth_gbps", "capacity_gbps"];
export const USUAL_GBPS = 1; // between regions of which nobody said anything

// One way, from the distance, as the catalogue's clouds have it.
export function byDistance(c: Data, a: number, b: number): number {
  const [p, q] = [c.regions[a], c.regions[b]];
  if (!placed(p) || !placed(q)) return 30;
  const km = kmBetween([p.longitude, p.latitude], [q.longitude, q.latitude]);
  return Math.round((catalogue.value.latency_ms_floor + catalogue.value.latency_ms_per_km * km) * 10) / 10;
}
/** Latencies of a region that were filled in follow it to another place; what somebody gave stays. */
export function guessAgain(d: Draft, r: number): void {
  const c = d.cluster;
  c.regions.forEach((_: Data, j: number) => {
    for (const [a, b] of [[r, j], [j, r]]) if (j !== r && isGuessed(`${regionId(a)} > ${regionId(b)}.latency_ms`)) guess(d, "latency_ms", a, b, byDistance(c, a, b));
  });
}

/** Whether a fault of a cluster is that nothing joins its regions, and filling in was not tried yet. */
export const fillable = (fault: string): boolean =>
  ["links", "cluster.links"].includes(pathOf(fault)) && !fault.endsWith(t("fillPlaces", { fault: "" }));
/** Of every region the part of the cluster that it is in: regions of one are joined, both ways. */
function parts(c: Data): number[] {
  const part: number[] = c.regions.map((_: Data, i: number) => i);
  const rate = (a: number, b: number): number => c.bandwidth_gbps?.[a]?.[b] ?? 0;
  for (let a = 0; a < part.length; a++)
    for (let b = 0; b < a; b++) {
      const [one, other] = [part[a], part[b]];
      if (one !== other && rate(a, b) > 0 && rate(b, a) > 0) part.forEach((p, i) => { if (p === one) part[i] = other; });
    }
  return part;
}
/** Fill in the links between regions with a place that nothing joins.

    @throws Error with the fault, where that does not join all. */
export function fillLinks(d: Draft, fault: string): void {
  const c = d.cluster, part = parts(c), n = part.length;
  for (const key of ["latency_ms", "bandwidth_gbps"]) c[key] = Array.from({ length: n }, (_, a) => Array.from({ length: n }, (_, b) => c[key]?.[a]?.[b] ?? null));
  let filled = 0;
  for (let a = 0; a < n; a++)
    for (let b = 0; b < n; b++)
      if (part[a] !== part[b] && !(c.bandwidth_gbps[a][b] > 0) && placed(c.regions[a]) && placed(c.regions[b])) {
        guess(d, "latency_ms", a, b, byDistance(c, a, b));
        guess(d, "bandwidth_gbps", a, b, USUAL_GBPS);
        filled++;
      }
  if (new Set(parts(c)).size > 1) throw new Error(t("fillPlaces", { fault }));
  notice.value = t("linksFilled", { n: filled });
}
