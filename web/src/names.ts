// What plans, and what differs in them, are called in the language of the page.

import type { Data } from "./api";
import { digits } from "./format";
import { maybe, t, type Key } from "./strings";

const CHANGE_NAMES: Record<string, Key> = {
  accumulation: "accumulation", activations: "packActivations", weight_gradients: "packGradients", prefetch: "prefetch",
  local_steps: "localSteps", algorithm: "algorithm", chunk_mb: "chunk", streams: "streams", overlap: "overlap",
  bandwidth_factor: "bwFactor", latency_factor: "latFactor", price_factor: "priceFactor", device_factors: "deviceSpeed",
};
const isPlain = (it: unknown): boolean => (it as object | null)?.constructor === Object;
/** Whether it is of the form of what can differ: a value a name, but links and types of devices. */
export function isChanges(it: unknown): it is Record<string, unknown> {
  return isPlain(it) && Object.entries(it as object).every(([name, value]) =>
    name === "links" ? Array.isArray(value) && value.every(isPlain)
    : name === "device_factors" ? isPlain(value)
    : Object.hasOwn(CHANGE_NAMES, name) && ["string", "number"].includes(typeof value));
}
/** What differs, in words. */
export function differences(said: Record<string, unknown>): string {
  const words = Object.entries(said).map(([name, value]) => {
    if (name === "links") return (value as Data[]).map((l) => `${l.source} → ${l.target}: ${[l.activations, l.weight_gradients].filter(Boolean).join(", ")}`).join("; ");
    if (name === "device_factors") {
      const all = Object.entries(value as Record<string, number>);
      return [...new Set(all.map(([, x]) => x))].map((x) => `${all.filter(([, y]) => y === x).map(([d]) => d).join(", ")} ×\u00a0${digits(x)}`).join("; ");
    }
    const text = name.endsWith("_factor") ? `×\u00a0${digits(value as number)}` : typeof value === "number" ? digits(value) : maybe(String(value));
    return `${t(CHANGE_NAMES[name])} ${text}`;
  });
  return words.join(" · ");
}
/** The name that somebody gave it; else a variant is called by the plan it is of, where that is listed, and what differs. */
export function called(j: Data, listed: Data[] | null): string {
  if (j.name || !j.parent) return j.name || j.id;
  const of = listed?.find((other) => other.id === j.parent);
  return [...(of ? [called(of, listed)] : []), differences(j.changes)].join(": ");
}
/** How activations and their gradients are packed on a link: one way goes the one, the other way the other. */
export function packings(l: Data): string[] {
  const packed = [l.activations, l.activation_gradients].filter((mode, i, all) => mode !== "none" && all.indexOf(mode) === i);
  return packed.length ? packed : ["none"];
}
