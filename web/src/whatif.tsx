// What if: controls that price the open plan again at once; the sentence and the figures above show what comes out.

import type { JSX } from "preact";
import type { Data } from "./api";
import { digits, seconds } from "./format";
import { useKept } from "./kept";
import * as controls from "../../polygon/web/controls.json";
import { changes, planId, planned, setChanges, shown, tried, tryOut } from "./state";
import { broken, comesOut, notRun } from "./summary";
import { maybe, t, type Key } from "./strings";

type Sliding = "bandwidth_factor" | "latency_factor" | "streams" | "accumulation" | "prefetch" | "local_steps" | "chunk_mb" | "overlap" | "price_factor";
const times = (v: number): string => `×\u00a0${digits(v)}`;

interface SliderProps { label: Key; name: string; values: number[]; now: number; text: (v: number) => string; take: (v: number) => void }
function Slider({ label, name, values, now, text, take }: SliderProps): JSX.Element {
  const near = values.reduce((best, v, i) => (Math.abs(v - now) < Math.abs(values[best] - now) ? i : best), 0);
  return (
    <label class="slider"><span>{t(label)}</span><b>{text(now)}</b>
      <input type="range" aria-label={t(label)} min={0} max={values.length - 1} step={1} value={near} data-change={name} aria-valuetext={text(now)} onInput={(e) => take(values[Number(e.currentTarget.value)])} /></label>
  );
}
function Select({ label, name, options, now, take }: { label: Key; name: string; options: [string, string][]; now: string; take: (v: string) => void }): JSX.Element {
  return <label class="field"><span>{t(label)}</span><select data-change={name} value={now} onChange={(e) => take(e.currentTarget.value)}>{options.map(([v, text]) => <option key={v} value={v} selected={v === now}>{text}</option>)}</select></label>;
}

export function WhatIf(): JSX.Element {
  const c = changes.value, p = planned.value;
  const [link, setLink] = useKept(`link ${planId.value}`, "");
  const [type, setType] = useKept(`type ${planId.value}`, "");
  const n = (name: string, fallback: number): number => (c[name] === undefined ? fallback : Number(c[name]));
  const slide = (label: Key, name: Sliding, text: (v: number) => string): JSX.Element => {
    const { values } = controls[name], off = name === "local_steps" ? p.local_steps : controls[name].unchanged;
    return <Slider label={label} name={name} values={values} now={n(name, off)} text={text} take={(v) => tryOut(name, v === off ? undefined : v)} />;
  };
  const used: Data[] = p.links.filter((l: Data) => l.activation_bytes + l.gradient_bytes > 0);
  const own = (c.links as Data[]) ?? [];
  const [source, target] = link.split("\n");
  const here: Data = link === "" ? c : own.find((x) => x.source === source && x.target === target) ?? {};
  const pack = (kind: string, v: string): void => {
    if (link === "") return tryOut(kind, v || undefined);
    const next: Data = { ...here, source, target, [kind]: v || undefined };
    const rest = own.filter((x) => !(x.source === source && x.target === target));
    const all = next.activations || next.weight_gradients ? [...rest, JSON.parse(JSON.stringify(next))] : rest;
    tryOut("links", all.length ? all : undefined);
  };
  const named = (names: string[]): [string, string][] => names.map((x) => [x, x]);
  const types = [...new Set<string>(p.regions.flatMap((r: Data) => Object.keys(r.devices)))].sort();
  const speeds = (c.device_factors as Record<string, number>) ?? {};
  const speed = (v: number): void => {
    const next = { ...speeds };
    for (const d of type ? [type] : types) if (v === 1) delete next[d]; else next[d] = v;
    tryOut("device_factors", Object.keys(next).length ? next : undefined);
  };
  return (
    <div id="controls" class="controls">
      <p class="soft">{t("whatifHint")}</p>
      <p class="comes-out">{tried.value ? <><b>{comesOut()}</b> <button type="button" class="link" onClick={() => setChanges({})}>{t("reset")}</button></> : <span class="soft">{t("step")} {seconds(p.estimate.step_s)}</span>}</p>
      {broken(shown.value) && <p class="error" role="alert">{broken(shown.value)}</p>}
      {!shown.value.run && <p class="error" role="alert">{notRun(shown.value)}</p>}
      <h3>{t("links")}</h3>
      {slide("bwFactor", "bandwidth_factor", times)}
      {slide("latFactor", "latency_factor", times)}
      {slide("streams", "streams", (v) => (v ? digits(v) : t("enough")))}
      <Select label="link" name="link" now={link} options={[["", t("allLinks")], ...used.map((l): [string, string] => [`${l.source}\n${l.target}`, `${l.source} → ${l.target}`])]} take={setLink} />
      <div class="two"><Select label="packActivations" name="activations" now={String(here.activations ?? "")} options={[["", t("asPlanned")], ...named(controls.activations.values)]} take={(v) => pack("activations", v)} />
        <Select label="packGradients" name="weight_gradients" now={String(here.weight_gradients ?? "")} options={[["", t("asPlanned")], ...named(controls.weight_gradients.values)]} take={(v) => pack("weight_gradients", v)} /></div>
      <h3>{t("tabSchedule")}</h3>
      {slide("accumulation", "accumulation", times)}
      {slide("prefetch", "prefetch", (v) => (v < 0 ? t("asPlanned") : times(v)))}
      {slide("localSteps", "local_steps", digits)}
      <Select label="algorithm" name="algorithm" now={String(c.algorithm ?? "hierarchical")} options={controls.algorithm.values.map((a): [string, string] => [a, maybe(a)])} take={(v) => tryOut("algorithm", v === "hierarchical" ? undefined : v)} />
      {slide("chunk", "chunk_mb", (v) => (v ? `${v}\u00a0MB` : t("whole")))}
      {slide("overlap", "overlap", (v) => `${v * 100}\u00a0%`)}
      <h3>{t("devices")}</h3>
      <Select label="deviceType" name="device" now={type} options={[["", t("allDevices")], ...types.map((d): [string, string] => [d, d])]} take={setType} />
      <Slider label="deviceSpeed" name="device_factors" values={controls.device_factors.values} now={Number(speeds[type || types[0]] ?? 1)} text={times} take={speed} />
      {slide("priceFactor", "price_factor", times)}
    </div>
  );
}
