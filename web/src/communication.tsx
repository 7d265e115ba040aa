// Communication: links in use, volumes and times, the heat-map, hiding advice, what better links save, formulas.

import type { JSX } from "preact";
import { post, type Data } from "./api";
import { axis, Chart, escape, tooltip } from "./chart";
import { dark, ink, palette } from "./colors";
import { brief, bytes, digits, gbps, ofMemory, ms, percent, roundBytes, seconds, signed } from "./format";
import { changes, planId, planned, setChanges, shown, tab } from "./state";
import { packings } from "./names";
import { isApart } from "./summary";
import { maybe, t, type Key } from "./strings";
import { Answer, Empty, Section, Table, useAnswer } from "./ui";

export function Communication(): JSX.Element {
  const v = shown.value, f = v.traffic, g = planned.value.traffic;
  const key = `${planId.value} ${JSON.stringify(changes.value)}`;
  const advice = useAnswer((stop) => post(`/plans/${planId.value}/advice`, changes.value, stop), key);
  const better = useAnswer((stop) => post(`/plans/${planId.value}/sensitivities`, changes.value, stop), key);
  const links = v.links.filter((l: Data) => l.activation_bytes + l.gradient_bytes > 0).sort((a: Data, b: Data) => b.busy - a.busy);
  const dimension = (name: Key, now: string, before: string, time: string): (JSX.Element | string)[] => [t(name), <>{now}{before !== now && <small class="soft"> {t("before")} {before}</small>}</>, time];
  return (
    <>
      <Section title={t("volumes")} note={isApart(v) ? t("commNote", { all: seconds(f.total_s), hidden: percent(f.hidden), ratio: digits(f.ratio) }) : t("commWithin", { all: seconds(f.total_s) })}>
        <div class="half-half"><div id="comm-volumes"><Table label={t("volumes")} head={[t("dimension"), t("volume"), t("time")]} numeric={[1, 2]} rows={[
          dimension("ppTraffic", bytes(f.pp_bytes), bytes(g.pp_bytes), seconds(f.pp_s)), dimension("dpTraffic", bytes(f.dp_bytes), bytes(g.dp_bytes), summed(f)),
          dimension("tpTraffic", bytes(f.tp_bytes), bytes(g.tp_bytes), f.tp_bytes > 0 ? t("withinCompute") : seconds(0)),
          dimension("across", bytes(f.cross_region_bytes), bytes(g.cross_region_bytes), "")]} /></div><Heat v={v} /></div>
      </Section>
      <Section title={t("linkTable")}>{links.length === 0 ? <Empty>{t("noTraffic")}</Empty> : <Table label={t("linkTable")} head={[t("link"), t("distance"), t("latency"), t("rate"), t("activations"), t("gradients"), t("linkUse")]} numeric={[1, 2, 3, 4, 5, 6]}
        rows={links.map((l: Data) => [<span class="whole" title={`${l.source} → ${l.target}`}>{brief(l.source, 22)} → {brief(l.target, 22)}</span>, l.distance_km === null ? "—" : `${digits(l.distance_km)}\u00a0km`, ms(l.latency_ms), gbps(l.bandwidth_gbps), sent(l.activation_bytes, packings(l)), sent(l.gradient_bytes, [l.weight_gradients]), percent(l.busy)])} />}
        {v.packings_inside.map((what: string) => <p key={what}>{t("reasonInside", { what })}</p>)}</Section>
      <Section title={t("advice")}><div id="advice"><Answer of={advice}>{(data) => <Advice data={data} />}</Answer></div></Section>
      {links.length > 0 && <Section title={t("sensitivity")}><div id="sensitivities"><Answer of={better}>{(rows) => <Better rows={rows} />}</Answer></div></Section>}
      <Section title={t("formulas")}><div id="formulas"><Table label={t("formulas")} head={[t("quantity"), t("formula"), t("numbers")]} rows={v.formulas.map((r: Data) => [maybe(`q_${r.key}`), r.formula, r.numbers])} /></div><p class="soft">{t("symbols")}</p></Section>
    </>
  );
}

/** The time of sums: of those that lie within the computing, what is beside it. */
const summed = (f: Data): string => (!f.dp_within ? seconds(f.dp_s) : f.dp_s > 0 ? t("withinComputeAnd", { time: seconds(f.dp_s) }) : t("withinCompute"));
const sent = (moved: number, modes: string[]): string => `${bytes(moved)}${moved && modes[0] !== "none" ? ` (${modes.join(", ")})` : ""}`;

const MOST_LABELS = 16;
function Heat({ v }: { v: Data }): JSX.Element | null {
  const colors = ink();
  // Regions that send or receive something: of 64 the names of all would hide each other.
  const moved = (l: Data): number => l.activation_bytes + l.gradient_bytes;
  const busy = new Set<string>(v.links.filter((l: Data) => moved(l) > 0).flatMap((l: Data) => [l.source, l.target]));
  const names: string[] = v.regions.map((r: Data) => r.name).filter((name: string) => busy.has(name));
  const index = new Map(names.map((n, i) => [n, i]));
  const cells = v.links.filter((l: Data) => index.has(l.source) && index.has(l.target)).map((l: Data) => [index.get(l.target), index.get(l.source), moved(l)]);
  const most = Math.max(...cells.map((c: number[]) => c[2]), 0);
  if (most === 0) return null;
  const short = (name: string): string => brief(name, 12);
  const many = names.length > MOST_LABELS;
  const label = { rotate: names.length > 4 ? 40 : 0, interval: many ? "auto" : 0, hideOverlap: many, formatter: short };
  const option = {
    tooltip: { ...tooltip(), formatter: (p: Data) => `${escape(names[p.value[1]])} → ${escape(names[p.value[0]])}<br>${bytes(p.value[2])}` },
    grid: { left: 92, right: 14, top: 8, bottom: names.length > 4 ? 84 : 60 },
    xAxis: { type: "category", data: names, ...axis({ axisLabel: label }) }, yAxis: { type: "category", data: names, inverse: true, ...axis({ axisLabel: { interval: many ? "auto" : 0, formatter: short } }) },
    visualMap: { min: 0, max: most, text: [roundBytes(most), "0"], orient: "horizontal", left: "center", bottom: 0, itemHeight: 80, itemWidth: 10, formatter: roundBytes, textStyle: { color: colors.soft, fontSize: 11 }, inRange: { color: [colors.land, palette()[0], dark.value ? "#d6e4f5" : "#12305a"] } },
    // In one go: ECharts goes on painting by parts what the page has left meanwhile, and fails.
    series: [{ type: "heatmap", data: cells, progressive: 0, itemStyle: { borderColor: colors.panel, borderWidth: 2 } }],
  };
  return <Chart name="heat" label={t("heat")} height={230} option={option} />;
}

/** Whether a measure keeps what is allowed: memory, and what it breaks of the limits that the plan before does not. */
const isKept = (m: Data): boolean => m.over_memory === 0 && breaks(m).length === 0;
const breaks = (m: Data): string[] => m.broken.filter((what: string) => !shown.value.broken.includes(what));

function Advice({ data }: { data: Data }): JSX.Element {
  // What brings nothing is not offered.
  const useful = (kind: string): Data[] => data.cases[kind].filter((m: Data) => m.speedup > 1e-3 || m.hidden > data.hidden + 1e-3)
    .sort((a: Data, b: Data) => Number(isKept(b)) - Number(isKept(a)) || b.speedup - a.speedup);
  return (
    <>
      <p>{t("adviceCase", { case: t(`case_${data.case}` as Key), ratio: `${digits(data.ratio)} ×`, hidden: percent(data.hidden) })}</p>
      {["balanced", "computation", "communication"].map((kind) => (
        <details key={kind} open={kind === data.case} class="more"><summary>{t(`case_${kind}` as Key)} <small class="soft">· {t("nMeasures", { n: useful(kind).length })}</small></summary>
          {useful(kind).length === 0 ? <Empty>{t("noMeasure")}</Empty> : <Table label={t(`case_${kind}` as Key)} head={[t("measure"), t("effect"), t("step"), t("hiddenAfter"), ""]} numeric={[1, 2, 3]} rows={useful(kind).map((m) => [
            <>{maybe(`m_${m.key}`)}{m.batch_factor !== 1 && <small class="soft">{t("batchTimes", { n: digits(m.batch_factor), batch: m.batch_factor * shown.value.batch.global_batch, step: seconds(m.step_s) })}</small>}</>, signed(m.speedup, percent),
            seconds(m.step_s / m.batch_factor), percent(m.hidden),
            <>{!isKept(m) && <span class="error">{[...breaks(m), ...(m.over_memory > 0 ? [t("overMemory", { n: ofMemory(m.over_memory) })] : [])].join(t("semicolon"))} </span>}
              {m.over_memory === 0 && <button type="button" class="small" aria-label={`${t("apply")}: ${maybe(`m_${m.key}`)}`} onClick={() => { setChanges({ ...changes.value, ...m.change }); if (innerWidth > 900) tab.value = "whatif"; }}>{t("apply")}</button>}</>])} />}
        </details>))}
    </>
  );
}
function Better({ rows }: { rows: Data[] }): JSX.Element {
  const felt = rows.filter((r) => r.saved_s > 1e-3 * shown.value.estimate.step_s);
  if (!felt.length) return <Empty>{t("noGain")}</Empty>;
  return <Table label={t("sensitivity")} head={[t("link"), t("better"), t("saves")]} numeric={[2]} rows={felt.map((r) => [`${r.source} ↔ ${r.target}`, maybe(r.what), seconds(r.saved_s)])} />;
}
