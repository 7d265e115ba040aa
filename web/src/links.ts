// Links between regions that nobody gave, as polygon/formats/default_links.py takes them: by distance, where both have a
// place, at a rate that is a placeholder, marked until somebody gives them. Without a place nothing is made up.

import type { Data } from "./api";
import { draft, guess, isGuessed, regionId, type Draft } from "./draft";
import { kmBetween, placed } from "./map";
import { catalogue } from "./state";

// One way [ms]; null: one of them has no place.
function byDistance(c: Data, a: number, b: number): number | null {
  const [p, q] = [c.regions[a], c.regions[b]];
  if (!placed(p) || !placed(q)) return null;
  const km = kmBetween([p.longitude, p.latitude], [q.longitude, q.latitude]);
  return Math.round((catalogue.value.latency_ms_floor + catalogue.value.latency_ms_per_km * km) * 10) / 10;
}
/** Fill in the latency from a region to another, where both have a place. */
export function guessLatency(d: Draft, a: number, b: number): void {
  const latency_ms = byDistance(d.cluster, a, b);
  if (latency_ms !== null) guess(d, "latency_ms", a, b, latency_ms);
}
/** Fill in the links, both ways, of a region that comes to have a place: to all with a place of which nothing is said. */
export function guessLinks(d: Draft, r: number): void {
  d.cluster.regions.forEach((to: Data, j: number) => {
    for (const [a, b] of j !== r && placed(d.cluster.regions[r]) && placed(to) ? [[r, j], [j, r]] : []) {
      if (d.cluster.bandwidth_gbps[a][b] !== null || d.cluster.latency_ms[a][b] !== null) continue;
      guessLatency(d, a, b);
      guess(d, "bandwidth_gbps", a, b, catalogue.value.between_gbps);
    }
  });
}
/** Latencies of a region that were filled in follow it to another place; what somebody gave stays. */
export function guessAgain(d: Draft, r: number): void {
  d.cluster.regions.forEach((_: Data, j: number) => {
    for (const [a, b] of [[r, j], [j, r]]) if (j !== r && isGuessed(`${regionId(a)} > ${regionId(b)}.latency_ms`)) guessLatency(d, a, b);
  });
  if (d.cluster.regions.length > 1 && !placed(draft.value.cluster.regions[r])) guessLinks(d, r);
}
