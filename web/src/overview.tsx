// The plan at a glance: map and stages, linked, and the step below them.

import { useComputed, useSignal, type Signal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import type { Data } from "./api";
import { regionColor } from "./colors";
import { WorldMap, UseScale, placed, type Place } from "./map";
import { brief, ofMemory, percent } from "./format";
import { go, lit, planId, pointed, shown, view } from "./state";
import { t } from "./strings";
import { Timeline } from "./timeline";
import { Skeleton } from "./ui";
import { Welcome } from "./welcome";

export function places(v: Data): Place[] {
  return v.regions.map((r: Data) => ({
    name: r.name, latitude: r.latitude ?? undefined, longitude: r.longitude ?? undefined, used: r.used,
    devices: Object.values(r.devices as Record<string, number>).reduce((a, b) => a + b, 0),
  }));
}
export function Overview(): JSX.Element {
  const v = shown.value;
  // The map at once, the rest in a task of its own: between them the browser draws and listens.
  const [rest, draw] = useState(false);
  useEffect(() => { const timer = setTimeout(() => draw(true)); return () => clearTimeout(timer); }, []);
  if (!v) return planId.value ? <Skeleton lines={8} /> : <Welcome />;
  const all = places(v);
  return (
    <div class="overview">
      <section class="section" aria-label={t("mapTitle")}>
        <div class="section-head"><h2>{t("mapTitle")}</h2><span class="grow" />{all.length > 1 && !all.every(placed) && <span class="soft">{t("noPositions")}</span>}<UseScale /></div>
        <WorldMap places={all} links={v.links} height={Math.round(Math.max(200, Math.min(380, innerHeight * 0.27)))} label={t("mapTitle")} onSelect={() => go(() => (view.value = "communication"))} />
      </section>
      {rest && <><Strip v={v} /><Timeline /></>}
    </div>
  );
}

/** A part of a whole, with its name and its number. */
function Bar({ name, part, title }: { name: string; part: number; title?: string }): JSX.Element {
  return <div class="bar" title={title}><span>{name}</span><span>{percent(part)}</span><div class="meter"><i class={part > 1 ? "over" : undefined} style={{ width: `${Math.min(100, 100 * part)}%` }} /></div></div>;
}

function Strip({ v }: { v: Data }): JSX.Element {
  const index = new Map<string, number>(v.regions.map((r: Data, i: number) => [r.name, i]));
  // One stop of the Tab key, arrows from stage to stage: a plan may have hundreds.
  const at = useSignal(0);
  const walk = (e: KeyboardEvent): void => {
    const to = { ArrowRight: at.value + 1, ArrowLeft: at.value - 1, Home: 0, End: v.stages.length - 1 }[e.key];
    if (to === undefined || !v.stages[to]) return;
    e.preventDefault();
    ((e.currentTarget as HTMLElement).children[to] as HTMLElement).focus();
  };
  return (
    <section class="section" aria-label={t("stages")}>
      <div class="section-head"><h2>{t("stages")}</h2><span class="soft">{t("stagesNote", { micro: v.micro_batches, size: v.micro_batch_size })}</span></div>
      <ol class="strip" onKeyDown={walk}>{v.stages.map((s: Data, i: number) => <Stage key={i} s={s} i={i} index={index} at={at} />)}</ol>
    </section>
  );
}

function Stage({ s, i, index, at }: { s: Data; i: number; index: Map<string, number>; at: Signal<number> }): JSX.Element {
  // Only the stages that light up or go dark are drawn again.
  const light = useComputed(() => lit.value?.stages.has(i) === true);
  const here = useComputed(() => at.value === i);
  const full = s.workers.reduce((a: Data, b: Data) => (b.peak_bytes / b.limit_bytes > a.peak_bytes / a.limit_bytes ? b : a));
  const who = (w: Data): string => `${w.region}: ${w.workers}${w.tp > 1 ? ` × ${w.tp}` : " ×"} ${w.device}`;
  const busy = Math.max(...s.workers.map((w: Data) => w.busy));
  const memory = t("memoryUse", { peak: ofMemory(full.peak_bytes), limit: ofMemory(full.limit_bytes) });
  const spoken = `${t("stage")} ${i}: ${s.layers}; ${s.workers.map(who).join(", ")}; ${t("busy")} ${percent(busy)}; ${t("memory")} ${percent(full.peak_bytes / full.limit_bytes)}, ${memory}`;
  return (
    <li class={light.value ? "lit" : undefined} tabIndex={here.value ? 0 : -1} data-stage={i} aria-label={spoken}
      onPointerEnter={() => (pointed.value = { stage: i })} onPointerLeave={() => (pointed.value = {})}
      onFocus={() => { at.value = i; pointed.value = { stage: i }; }} onBlur={() => (pointed.value = {})}>
      <div aria-hidden="true">
      <div class="strip-head"><b>{i}</b><span>{s.layers}</span></div>
      <ul>{s.workers.slice(0, 3).map((w: Data, j: number) => (
        <li key={j} title={who(w)}><i class="dot" style={{ background: regionColor(index.get(w.region)!) }} />{w.workers}{w.tp > 1 ? ` × ${w.tp}` : " ×"} {brief(w.device, 12)} <span class="soft">{w.region}</span></li>
      ))}{s.workers.length > 3 && <li class="soft">{t("andMore", { n: s.workers.length - 3 })}</li>}</ul>
      <Bar name={t("busy")} part={busy} />
      <Bar name={t("memory")} part={full.peak_bytes / full.limit_bytes} title={memory} />
      </div>
    </li>
  );
}
