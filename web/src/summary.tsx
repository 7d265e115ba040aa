// One sentence and four figures of the open plan, and what is different where something is tried.

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { post, type Data } from "./api";
import { draft } from "./draft";
import { digits, energy, gbps, ms, ofMemory, percent, seconds, signed, usd } from "./format";
import { called, differences } from "./names";
import { anew, assumed, attempt, changes, isPriced, isUnderWay, jobs, limits, loading, once, openMade, openPlan, outcome, planId, planned, progress, row, setChanges, shown, tried, view } from "./state";
import { language, programName, t, type Key } from "./strings";
import { Skeleton } from "./ui";

/** A resource in words: "the network inside frankfurt". */
export function resource(l: Data): string {
  const words = t(`limit_${l.kind}` as Key, { region: l.region, other: l.other, device: l.device });
  if (l.kind === "pair" && l.quality === "capacity") return t("capacityOf", { what: words });
  return l.quality === "latency" ? t("latencyOf", { what: words }) : words;
}
/** Its value, as it is or as it could be. */
export function amount(l: Data, value: number): string {
  if (l.quality === "latency") return ms(value);
  if (l.quality) return gbps(value);
  return l.kind === "memory" ? ofMemory(value * 2 ** 30) : `×\u00a0${digits(value)}`;
}
/** A link that nobody gave, in words. */
export function assumedLink(a: Data): string {
  if (a.other) return t("limit_pair", a);
  return t(`limit_${a.name.slice(a.name.lastIndexOf(".") + 1)}` as Key, { region: a.region, device: a.device });
}
// How many times as fast a link that nobody gave is made, as in polygon/planning/assumptions.py.
export const ASSUMED_FACTOR = 4;
export function exposed(v: Data): number {
  return v.traffic.exposed_s / v.estimate.step_s;
}
/** Whether messages take time of their own: sums that a runtime spreads over its computing count as that. */
export const isApart = (v: Data): boolean => v.traffic.pp_s + v.traffic.dp_s > 0;
// What saves less is not worth a word.
export const WORTH = 0.01;
/** Dollars for a billion tokens. */
export const perBillion = (e: Data): number => (e.cost_usd / (e.tokens_per_s * e.step_s)) * 1e9;
/** An amount of dollars, unless it is nothing for the one reason that nobody said what devices cost. */
export const usdIfKnown = (value: number, unpriced: string[] = []): string => (isPriceKnown(value, unpriced) ? usd(value) : UNKNOWN);
/** Energy, unless it is nothing because nobody said what devices draw. */
export const energyIfKnown = (joules: number): string => (joules ? energy(joules) : UNKNOWN);
const UNKNOWN = "—";
/** Whether anybody said what a plan's devices cost. */
export const isPriceKnown = (value: number, unpriced: string[] = []): boolean => value !== 0 || !unpriced.length;

/** The link that nobody gave with which another plan would gain more than this one with what limits it, if there is one:
    a plan made for a slow network avoids it, and is then limited by something else. */
export function hiddenLimit(): Data | undefined {
  const first = limits.value?.limits[0];
  const most = Math.max(WORTH, first?.saves ?? 0, first?.would_save ?? 0);
  return assumed.value?.find((a) => a.anew > Math.max(a.faster, most));
}

const MOST_NAMED = 3;
/** What limits the plan together, in words; empty where one resource does. */
export function together(): string {
  const all: Data[] = limits.value?.together ?? [];
  if (!all.length) return "";
  const named = all.slice(0, MOST_NAMED).map(resource);
  if (all.length > MOST_NAMED) named.push(t("nMore", { n: all.length - MOST_NAMED }));
  // Chinese sets a Latin name apart from the character before it.
  return new Intl.ListFormat(language.value).formatToParts(named)
    .map((part, i, all) => (part.value === "和" && /^\w/.test(all[i + 1].value) ? "和 " : part.value)).join("");
}
function limited(): string {
  const found = limits.value?.limits;
  if (!found) return "";
  const [first] = found;
  const joint = together();
  const hidden = hiddenLimit();
  if (hidden) {
    const least = t("assumedLimit", { what: assumedLink(hidden), now: gbps(hidden.bandwidth_gbps), value: gbps(hidden.bandwidth_gbps * ASSUMED_FACTOR), part: percent(hidden.anew) });
    const what = joint || (first ? resource(first) : "");
    return what && what !== assumedLink(hidden) ? least + t("thisPlanBy", { what }) : least;
  }
  if (joint) return t("limitedTogether", { what: joint, part: percent(limits.value.together_saves), alone: percent(first?.saves ?? 0) });
  if (!first) return t("limitedByNothing");
  const what = t("limitedBy", { what: resource(first) });
  const again = anew.value[0];
  if (again && again.would_save > Math.max(WORTH, first.would_save) && again.quality) return what + t("anewWouldSave", { value: amount(again, again.value), part: percent(again.would_save) });
  return first.suggested === null ? `${what}${t("period")}` : what + t("wouldSave", { value: amount(first, first.suggested), part: percent(first.would_save) });
}

export function Sentence(): JSX.Element {
  const v = planned.value;
  if (!v) return <h1 class="sentence">{loading.value ? t("opening") : t(`ask_${draft.value.objective}` as Key)}</h1>;
  const [before, after] = opened(v, "\n").split("\n");
  return (
    <h1 class="sentence">
      {before}<b>{seconds(v.estimate.step_s)}</b>{after}
      {limits.value?.limits.length || limits.value?.whole ? <span class={limits.value.whole && assumed.value ? "" : "waiting"}>{limited()}</span> : <span class="waiting">{t("lookingForLimit")}</span>}
    </h1>
  );
}

const opened = (v: Data, step: string): string => t("sentence", { step, used: digits(v.devices.used), all: digits(v.devices.all) });

const RESTED_MS = 500, HEARD_MS = 10_000;
/** What a screen reader is told, once: that a search runs, how long a step of the plan takes as soon as there is one, what
    limits it when that is known for good, and what comes out of what is tried when it rests. Who reads to the end of the
    page later does not meet it again. */
export function Spoken(): JSX.Element {
  const v = planned.value, whole = limits.value?.whole && assumed.value;
  const found = v && shown.value && !progress.value ? opened(v, seconds(v.estimate.step_s)) : "";
  const now = progress.value ? t("working") : found && tried.value ? (isPriced.value ? comesOut() : "") : found && whole ? found + limited() : found;
  const [told, tell] = useState("");
  const last = useRef("");
  useEffect(() => {
    const timer = setTimeout(() => {
      last.current = last.current && last.current === found ? now.replace(found, "").replace(/^[,.，。] ?/, "") || now : now;
      tell(last.current);
    }, RESTED_MS);
    return () => clearTimeout(timer);
  }, [now]);
  useEffect(() => { const timer = setTimeout(() => tell(""), HEARD_MS); return () => clearTimeout(timer); }, [told]);
  useEffect(() => { const timer = setTimeout(() => (outcome.value = ""), HEARD_MS); return () => clearTimeout(timer); }, [outcome.value]);
  return <><div class="hidden" aria-live="polite" aria-atomic="true" id="spoken">{told}</div><div class="hidden" aria-live="polite" aria-atomic="true" id="outcome">{outcome.value}</div></>;
}
/** The step with what is tried, and how many tokens more or less that is. */
export function comesOut(): string {
  if (!isPriced.value) return t("computing");
  const e = shown.value.estimate, f = planned.value.estimate;
  return `${t("step")} ${seconds(e.step_s)} · ${t("before")} ${seconds(f.step_s)} · ${speedChange()}`;
}
const speedChange = (): string => (!isPriced.value ? t("computing") : t("speedChange", { part: signed(shown.value.estimate.tokens_per_s / planned.value.estimate.tokens_per_s - 1, percent) }));

function Figure({ name, value, note, before }: { name: Key; value: string; note: string; before?: string }): JSX.Element {
  return (
    <div class="figure" data-card={name}>
      <dt>{t(name)}</dt>
      <dd><b>{value}</b><small>{before && before !== value ? `${t("before")} ${before}` : note}</small></dd>
    </div>
  );
}
export function Figures(): JSX.Element | null {
  const v = shown.value, p = planned.value;
  if (!v || !p) return loading.value ? <Skeleton lines={2} /> : null;
  const e = v.estimate, f = p.estimate;
  return (
    <dl class="figures">
      <Figure name="step" value={seconds(e.step_s)} before={seconds(f.step_s)} note={`90 %: ${seconds(e.low_s)} – ${seconds(e.high_s)}`} />
      <Figure name="perBillion" value={usdIfKnown(perBillion(e), v.unpriced)} before={v.unpriced.length && !f.cost_usd ? undefined : usd(perBillion(f))} note={v.unpriced.length ? t("noPrice", { devices: v.unpriced.join(", ") }) : t("perStep", { usd: usd(e.cost_usd) })} />
      <Figure name="gap" value={gapText(e)} before={aim(f).gap === null || !isSame(aim(e).least, aim(f).least) ? undefined : gapText(f)} note={boundNote(v)} />
      <Figure name="exposedTime" value={percent(exposed(v))} before={percent(exposed(p))} note={isApart(v) ? t("ofCommunication", { part: percent(v.traffic.hidden) }) : t("longerFor")} />
    </dl>
  );
}

/** The bound; and which devices count as nothing in what the plan was made for, where the figures beside do not say so. */
function boundNote(v: Data): string {
  const bound = boundText(v.estimate);
  return row.value?.objective === "energy" && v.unpowered.length ? [bound, t("noPower", { devices: v.unpowered.join(", ") })].filter(Boolean).join(" · ") : bound;
}

export const keep = (): Promise<void> => once("keep", () => attempt(() => openMade(() =>
  post(`/plans/${planId.value}/variants`, { changes: changes.value }), view.value)));
const AIMS: Record<string, [string, string, (value: number) => string]> = {
  money: ["cost_usd", "least_usd", usd], "tokens-per-usd": ["cost_usd", "least_usd", usd], energy: ["energy_j", "least_energy_j", energy],
};
interface Aim { value: number; least: number | null; gap: number | null; text: (value: number) => string }
/** What a plan (the open one) was made for, of an estimate: its value, what no plan can beat (null: not known yet), and how far
    it is above; null: not known (yet), or no part of a bound of nothing, as where nobody said what devices cost. */
export function aim(e: Data, of: Data = row.value): Aim {
  const [key, bound, text] = AIMS[of?.objective] ?? ["step_s", "lower_bound_s", seconds];
  const value = e[key], least = e[bound];
  return { value, least, gap: least ? value / least - 1 : null, text };
}
/** Whether two bounds are one: gaps to different bounds are not held against each other. */
const isSame = (a: number | null, b: number | null): boolean => a !== null && b !== null && Math.abs(a - b) <= 1e-9 * Math.abs(b);
/** How far a plan is above what no plan can beat, and what that is. */
export function gapText(e: Data, of?: Data): string {
  const { gap, least } = aim(e, of);
  return gap !== null ? percent(gap) : least === null ? "…" : UNKNOWN;
}
export function boundText(e: Data, of?: Data): string {
  const { least, text } = aim(e, of);
  return least === null ? "" : t("noFaster", { step: text(least) });
}
const LATE_MS = 400;
/** A plan that takes its time to be opened is named: what stands there until it is here is the one before. */
export function Opening(): JSX.Element | null {
  const isOpening = loading.value && planned.value !== null;
  const [late, set] = useState(false);
  useEffect(() => {
    if (!isOpening) return set(false);
    const timer = setTimeout(() => set(true), LATE_MS);
    return () => clearTimeout(timer);
  }, [isOpening]);
  const to = jobs.value?.find((j: Data) => j.id === planId.value);
  return isOpening && late ? <p class="opening" role="status" id="opening">{to ? t("openingOf", { name: called(to, jobs.value) }) : t("opening")}</p> : null;
}
/** What the plan breaks of what is asked, be it with what is tried or as it was kept or opened; empty: nothing. */
export function broken(v: Data): string {
  const said: string[] = [...v.broken, ...(v.over_memory > 0 ? [t("overMemory", { n: ofMemory(v.over_memory) })] : [])];
  return said.length ? t("broken", { what: said.join(t("semicolon")) }) : "";
}
/** That plans of devices without a known price, or power, are not drawn against it, and what these count as in others. */
export const Unsaid = ({ devices, ofEnergy = false }: { devices: string[]; ofEnergy?: boolean }): JSX.Element | null =>
  devices.length ? <p class="soft" id={ofEnergy ? "unpowered" : "unpriced"}>{t(ofEnergy ? "notDrawnPower" : "notDrawn", { devices: devices.join(", ") })}</p> : null;
/** Where something is of the plan as it was made, though more is tried on it: that is said. */
export function WithoutTried({ words }: { words: "keepFirst" | "comparedWithout" | "fileWithout" | "drawerWithout" }): JSX.Element | null {
  return tried.value ? <p class="error" role="status">{t(words)}</p> : null;
}
export function Broken(): JSX.Element | null {
  const v = shown.value;
  if (!v || loading.value) return null; // as the banner
  return <>{broken(v) && <p class="error broken" id="broken">{broken(v)}</p>}{!v.run && <p class="error broken" id="not-run">{notRun(v)}</p>}</>;
}
/** That the program does not run a plan as it is, with what is tried or as it was kept or opened. */
export const notRun = (v: Data): string => t("notRun", { runtime: programName(v.runtime) });
export function Banner(): JSX.Element | null {
  const v = shown.value, p = planned.value;
  if (!v || !p || loading.value) return null; // while a plan is opened, the one before is shown
  if (tried.value) {
    return (
      <div class="banner"><span><b>{t("whatif")}</b> {differences(changes.value)} · {speedChange()}</span>
        <span class="grow" /><button type="button" class="main" id="keep" aria-disabled={isUnderWay("keep")} onClick={() => void keep()}>{t("keepVariant")}</button>
        <button type="button" id="reset" onClick={() => setChanges({})}>{t("reset")}</button></div>
    );
  }
  const parent = row.value?.parent;
  if (!parent) return null;
  return (
    <div class="banner"><span><b>{t("variant")}</b> {differences(row.value.changes)}</span><span class="grow" />
      <button type="button" onClick={() => openPlan(parent, view.value)}>{t("openParent")}</button></div>
  );
}
