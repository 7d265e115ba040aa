// Strategy: the plan stage by stage, its reasons, and what it is held against.

import type { JSX } from "preact";
import { get, type Data } from "./api";
import { axis, Chart, tooltip } from "./chart";
import { ink, palette } from "./colors";
import { bytes, digits, energy, ofMemory, percent, runs, seconds, signed, usd } from "./format";
import { packings } from "./names";
import { attempt, copyLink, planId, row, savePlan, shown } from "./state";
import { aim, energyIfKnown, isApart, isPriceKnown, Unsaid, usdIfKnown, WithoutTried } from "./summary";
import { maybe, programName, t } from "./strings";
import { Answer, Section, Table, useAnswer } from "./ui";

function reasons(v: Data): string[] {
  const { value, least, gap, text } = aim(v.estimate), isTime = text === seconds;
  // One micro-batch more or less is what division leaves over.
  const shares: number[][] = v.stages.map((s: Data) => [Math.min(...s.workers.map((w: Data) => w.share_low)), Math.max(...s.workers.map((w: Data) => w.share_high))]);
  const uneven = shares.filter(([low, high]) => high > low + 1);
  const workers: Data[] = v.stages.flatMap((s: Data) => s.workers);
  const degrees = [...new Set(workers.map((w) => w.tp))].filter((tp) => tp > 1).sort((a, b) => a - b);
  const full = workers.reduce((a, b) => (b.peak_bytes / b.limit_bytes > a.peak_bytes / a.limit_bytes ? b : a));
  const used: Data[] = v.links.filter((l: Data) => l.activation_bytes + l.gradient_bytes > 0);
  const modes = [...new Set(used.flatMap((l) => [...(l.activation_bytes ? packings(l) : []), ...(l.gradient_bytes ? [l.weight_gradients] : [])]))];
  return [
    ...(gap === null ? [] : [t(isTime ? "reasonGap" : "reasonLeast", { bound: text(least!), step: text(value), gap: percent(gap) })]),
    v.stages.length === 1 ? t("reasonOneStage", { width: v.stages[0].width }) : t("reasonStages", { stages: v.stages.length, widths: runs(v.stages.map((s: Data) => s.width)) }),
    ...(uneven.length ? [t("reasonShares", { ranges: [...new Set(uneven.map((r) => r.join("–")))].slice(0, 8).join(", ") })] : []),
    ...(v.devices.all === 1 ? [] : [degrees.length ? t("reasonTensor", { tp: degrees.join(", ") }) : t(isTime ? "reasonNoTensor" : "reasonNoTensorOther")]),
    ...(v.devices.used < v.devices.all ? [t(isTime ? "reasonIdle" : "reasonIdleOther", { idle: v.devices.all - v.devices.used, all: v.devices.all })] : []),
    ...(modes.length ? [t("reasonPacking", { modes: modes.map((mode) => (mode === "none" ? t("unpacked") : mode)).join(", "), bytes: bytes(v.traffic.cross_region_bytes) })] : []),
    ...v.packings_inside.map((what: string) => t("reasonInside", { what })),
    ...(isApart(v) ? [t("reasonHidden", { hidden: percent(v.traffic.hidden) })] : []),
    t("reasonMemory", { peak: ofMemory(full.peak_bytes), limit: ofMemory(full.limit_bytes), owner: full.memory_owner }),
  ];
}
const span = (values: number[]): string => {
  const low = Math.min(...values), high = Math.max(...values);
  return low === high ? String(low) : `${low} – ${high}`;
};

export function Strategy(): JSX.Element {
  const v = shown.value;
  const answer = useAnswer((stop) => get(`/plans/${planId.value}/alternatives`, stop), planId.value);
  const rows = v.stages.flatMap((s: Data, i: number) => s.workers.map((w: Data, k: number) => [
    k === 0 ? String(i) : <span class="hidden">{i}</span>, k === 0 ? s.layers : "", w.region, <span class="whole">{w.workers} × {w.tp > 1 ? `${w.tp} ` : ""}{w.device}</span>,
    w.share_low === w.share_high ? w.share_low : `${w.share_low}–${w.share_high}`, percent(w.busy),
    <span class={w.peak_bytes > w.limit_bytes ? "error" : undefined}>{ofMemory(w.peak_bytes)} / {ofMemory(w.limit_bytes)}</span>,
    k === 0 ? [s.zero ? `ZeRO-${s.zero}` : "", s.recompute !== "none" ? `${t("recompute")} ${s.recompute}` : "", s.trees ? t("sumTrees", { n: s.trees }) : ""].filter(Boolean).join(", ") : "",
  ]));
  const degrees = `${t("pipelineDegree")} ${v.stages.length} · ${t("dataDegree")} ${span(v.stages.map((s: Data) => s.width))} · ${t("tensorDegree")} ${span(v.stages.flatMap((s: Data) => s.workers.map((w: Data) => w.tp)))}`;
  return (
    <>
      <Section title={t("planTable")} note={degrees} tools={<>
        <button type="button" class="small" onClick={() => void attempt(savePlan)}>{t("planFile")}</button>
        <button type="button" class="small" id="share" onClick={() => void attempt(copyLink)}>{t("shareLink")}</button></>}>
        <WithoutTried words="fileWithout" />
        <Table label={t("planTable")} head={[t("stage"), t("layers"), t("region"), t("workers"), t("share"), t("busy"), t("memory"), t("options")]} rows={rows} numeric={[4, 5, 6]} />
        <p class="soft">{t("ranWith", { runtime: programName(v.runtime), micro: v.micro_batches, size: v.micro_batch_size })}{v.local_steps > 1 ? ` · ${t("every", { n: v.local_steps })}` : ""} · {t("tokensEach", { n: digits(v.estimate.tokens_per_s) })} · {t("mfu")} {percent(v.estimate.mfu)}</p>
      </Section>
      <Section title={t("reasons")}><ul class="plain" id="reasons">{reasons(v).map((r) => <li key={r}>{r}</li>)}</ul></Section>
      <Section title={t("radar")}><WithoutTried words="comparedWithout" /><Answer of={answer} lines={8}>{(data) => <Alternatives data={data} />}</Answer></Section>
    </>
  );
}

/** In a watt-hour. */
const JOULES = 3600;
const AXES = ["computation", "communication", "memory", "scalability", "across"];
function Alternatives({ data }: { data: Data }): JSX.Element {
  const colors = ink(), own = data.alternatives[0];
  // Better in what the plan was made for, where that is known.
  const made = { money: "usd_per_step", "tokens-per-usd": "usd_per_step", energy: "energy_j" }[String(row.value?.objective)] ?? "step_s";
  const ofEnergy = made === "energy_j";
  const unsaid = (a: Data): string[] => (ofEnergy ? a.unpowered : a.unpriced);
  const isKnown = (a: Data): boolean => (ofEnergy ? a.energy_j > 0 : isPriceKnown(a.usd_per_step, a.unpriced));
  // What is partly unknown is not known to be less.
  const better = data.alternatives.slice(1).filter((a: Data) => (made === "step_s" || !unsaid(a).length) && a[made] < own[made] * (1 - 1e-6)).sort((a: Data, b: Data) => a[made] - b[made])[0];
  const drawn: Data[] = data.points.filter(isKnown), isBest = (p: Data): boolean => (ofEnergy ? p.best_in_energy : p.best);
  const unknown = [...new Set<string>(data.points.flatMap(unsaid))].sort();
  const radar = {
    tooltip: tooltip(), legend: { bottom: 0, textStyle: { color: colors.text, fontSize: 11 } },
    radar: { center: ["50%", "46%"], radius: "44%", indicator: AXES.map((a) => ({ name: maybe(`axis_${a}`), max: 1, min: 0 })), axisName: { color: colors.soft, fontSize: 11, formatter: (name: string) => name.replace(" ", "\n") }, splitArea: { show: false }, splitLine: { lineStyle: { color: colors.line } }, axisLine: { lineStyle: { color: colors.line } } },
    series: [{ type: "radar", symbolSize: 4, data: data.alternatives.map((a: Data, i: number) => ({ name: maybe(a.key), value: AXES.map((x) => Number(a.axes[x].toFixed(3))), lineStyle: { width: i === 0 ? 2.5 : 1.2, type: i === 0 ? "solid" : "dashed" }, areaStyle: i === 0 ? { opacity: 0.14 } : undefined })) }],
  };
  const points = {
    tooltip: tooltip(), grid: { left: 58, right: 70, top: 30, bottom: 44 },
    xAxis: { type: "value", scale: true, name: `${t("step")} (s)`, nameLocation: "middle", nameGap: 26, ...axis() }, yAxis: { type: "value", scale: true, ...(ofEnergy ? { name: t("energyOnly"), ...axis({ axisLabel: { formatter: (watt_hours: number) => energy(watt_hours * JOULES) } }) } : { name: t("cost"), ...axis() }) },
    series: [{ type: "scatter", data: drawn.map((p: Data) => ({ name: maybe(p.key), key: p.key, value: [p.step_s, ofEnergy ? p.energy_j / JOULES : p.usd_per_step], symbolSize: p.key === "plan" ? 15 : 9, itemStyle: { color: isBest(p) ? palette()[p.key === "plan" ? 0 : 2] : "transparent", borderColor: palette()[p.key === "plan" ? 0 : isBest(p) ? 2 : 1], borderWidth: 1.5 }, label: { show: p.key !== "other", position: p.key === "plan" ? "top" : "right", color: p.key === "plan" ? colors.text : colors.soft, fontSize: 11, formatter: maybe(p.key) } })), labelLayout: { hideOverlap: true } }],
  };
  const part = (a: Data, key: string): string => (a === own ? "—" : signed(a[key] / own[key] - 1, percent));
  return (
    <>
      {better && <p class="error" id="better-met">{made === "step_s" ? t("fasterMet", { name: maybe(better.key), step: seconds(better.step_s) }) : ofEnergy ? t("lessEnergyMet", { name: maybe(better.key), energy: energy(better.energy_j) }) : t("cheaperMet", { name: maybe(better.key), usd: usd(better.usd_per_step) })}</p>}
      <div class="half-half"><Chart name="radar" label={t("radar")} height={300} option={radar} />{drawn.length > 0 && <Chart name="pareto" label={t(ofEnergy ? "paretoEnergy" : "pareto")} height={300} option={points} />}</div>
      <Unsaid devices={unknown} ofEnergy={ofEnergy} />
      <Table label={t("alternatives")} head={[t("alternatives"), t("step"), t("timeChange"), ...(ofEnergy ? [t("energyOnly")] : []), t("cost"), t("devices"), t("stagesCount")]} numeric={[1, 2, 3, 4, 5, 6]}
        rows={data.alternatives.map((a: Data) => [maybe(a.key), seconds(a.step_s), part(a, "step_s"), ...(ofEnergy ? [energyIfKnown(a.energy_j)] : []), usdIfKnown(a.usd_per_step, a.unpriced), a.devices, a.stages])} />
      <details class="more"><summary>{t("aboutAxes")}</summary><p class="soft">{t("axes")}</p><p class="soft">{t("others")}</p><p class="soft">{t("paretoHint")}</p></details>
    </>
  );
}
