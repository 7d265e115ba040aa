// Runs: what was measured beside what was predicted, while it runs and after.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { call, get, post, type Data } from "./api";
import { axis, Chart, tooltip } from "./chart";
import { ink, kindColors, palette } from "./colors";
import { digits, percent, roundSeconds, seconds, signed } from "./format";
import { attempt, follow, go, isUnderWay, once, openRun, outcome, planId, runName } from "./state";
import { t, type Key } from "./strings";
import { Legend, Rows, type Window } from "./timeline";
import { Answer, Empty, Section, Skeleton, Table, Upload, useAnswer } from "./ui";

export const goesOn = (run: Data): boolean => run.state === "running" || run.state === "open";

/** A run, followed until it has ended; `null` until the first is known. */
export function useRun(name: string): { run: Data; error: string } {
  const [state, set] = useState<{ run: Data; error: string }>({ run: null, error: "" });
  useEffect(() => {
    const stop = new AbortController();
    set({ run: null, error: "" });
    if (name) {
      follow(`/runs/${name}`, stop.signal, (run) => { if (run.points && !stop.signal.aborted) set({ run, error: "" }); }, goesOn)
        .catch((e: Error) => { if (!stop.signal.aborted) set({ run: null, error: e.message }); });
    }
    return () => stop.abort();
  }, [name]);
  return state;
}

export function RunsPane(): JSX.Element {
  const [asked, ask] = useState(0);
  const list = useAnswer((stop) => get("/runs", stop), `${asked} ${runName.value}`);
  return (
    <>
      <Section title={t("runsTitle")} note={t("runsHint")} tools={planId.value ? <Upload label={t("openRun")} id="open-run" many take={(texts) => void attempt(() => openRun(texts))} /> : undefined}>
        <Answer of={list}>{({ runs }) => runs.length === 0 ? <Empty>{t("runsNone")}</Empty> : (
          <ul class="runs" id="runs">{[...runs].sort((a: Data, b: Data) => Number(b.plan === planId.value) - Number(a.plan === planId.value)).map((run: Data) => (
            <li key={run.name}><button type="button" class="plan" aria-pressed={run.name === runName.value} onClick={() => go(() => (runName.value = run.name))}>
              <span class="plan-name">{run.name}</span><small><State run={run} /> · {run.model} · {run.step_s === null ? seconds(run.predicted_step_s) : seconds(run.step_s)}{run.plan && run.plan === planId.value ? ` · ${t("runOf")}` : ""}</small></button></li>))}</ul>)}</Answer>
      </Section>
      {runName.value && <Beside key={runName.value} name={runName.value} changed={() => ask(asked + 1)} />}
    </>
  );
}

export const State = ({ run }: { run: Data }): JSX.Element => (
  <span class={`state ${run.state}`}>{t(`runState_${run.state}` as Key)}</span>
);
export const steps = (run: Data): string => (run.wanted && run.state !== "open" ? t("runSteps", { steps: run.reached, wanted: run.wanted }) : t("runStepsOnly", { steps: run.steps }));

export function StopRun({ run }: { run: Data }): JSX.Element | null {
  if (run.state !== "running") return null;
  return <button type="button" class="small stop-run" aria-disabled={isUnderWay(`stop ${run.name}`)} onClick={() => void once(`stop ${run.name}`, () => attempt(async () => void (await post(`/runs/${run.name}/stop`, {}))))}>{t("stopRun")}</button>;
}

function Beside({ name, changed }: { name: string; changed: () => void }): JSX.Element {
  const { run, error } = useRun(name);
  const remove = (): Promise<void> => once(`remove ${name}`, () => attempt(async () => {
    await call("DELETE", `/runs/${name}`);
    if (runName.value === name) go(() => (runName.value = ""));
    changed();
  }));
  const sentence = !run ? "" : run.step_s === null ? t("runPredicted", { predicted: seconds(run.predicted_step_s) }) : t(run.device === "cpu" ? "runSentenceOnCpu" : "runSentence", { measured: seconds(run.step_s), predicted: seconds(run.predicted_step_s), error: signed(run.error, percent) });
  const rests = run && !goesOn(run);
  useEffect(() => { if (rests) outcome.value = sentence; }, [rests]);
  if (error) return <p class="error" role="alert">{error}</p>;
  if (!run) return <Skeleton lines={6} />;
  const own = run.kind === "rehearsal" || run.kind === "import";
  return (
    <>
      <Section title={name} id="run" note={<><State run={run} /> · {steps(run)} · {t("runRanks", { ranks: run.ranks })}</>}
        tools={<><StopRun run={run} />{own && !goesOn(run) && <button type="button" class="small danger" onClick={() => void remove()}>{t("removeRun")}</button>}</>}>
        <p class="run-sentence" id="run-sentence">{sentence}</p>
        {run.device === "cpu" && <p class="soft">{t("runOnCpu")}</p>}
        {run.points.length > 0 && <div class="half-half">
          <Lines name="run-loss" label={t("runLoss")} points={run.points.map((p: number[]) => [p[0], p[2]])} text={(v) => digits(v)} />
          <Lines name="run-step" label={t("runStep")} points={run.points.map((p: number[]) => [p[0], p[1]])} text={roundSeconds} level={run.device === "cpu" ? undefined : run.predicted_step_s} />
        </div>}
      </Section>
      <Traced name={name} of={`${name} ${Math.min(run.steps, 12)} ${run.state}`} waits={!run.traced || (run.steps < 2 && run.state === "running")} goesOn={run.state === "running" || run.state === "open"} />
      {run.log && <Section title={t("runLog")}><Tail text={run.log} /></Section>}
    </>
  );
}

/** The end of a log, which stays in sight as it grows. */
export function Tail({ text }: { text: string }): JSX.Element {
  const [place, set] = useState<HTMLPreElement | null>(null);
  useEffect(() => { if (place) place.scrollTop = place.scrollHeight; }, [text, place]);
  return <pre ref={set} class="tail" tabIndex={0} aria-label={t("runLog")}>{text}</pre>;
}

function Lines({ name, label, points, text, level }: { name: string; label: string; points: (number | null)[][]; text: (value: number) => string; level?: number }): JSX.Element {
  const line = { type: "line", showSymbol: points.length < 3, symbolSize: 5 };
  const ends = [points[0][0], points[points.length - 1][0]];
  const series = [{ ...line, name: label, data: points, lineStyle: { width: 1.6 } }, ...(level === undefined ? [] : [{ ...line, name: t("predictedName"), data: ends.map((x) => [x, level]), showSymbol: false, lineStyle: { type: "dashed", color: ink().soft, width: 1.2 }, itemStyle: { color: ink().soft } }])];
  const option = {
    tooltip: { ...tooltip(), trigger: "axis", valueFormatter: text }, grid: { left: 56, right: 14, top: 28, bottom: 26 }, color: [palette()[0]],
    xAxis: { type: "value", min: ends[0], max: Math.max(Number(ends[1]), Number(ends[0]) + 1), minInterval: 1, ...axis() },
    yAxis: { type: "value", scale: true, name: label, nameTextStyle: { align: "left" }, ...axis({ axisLabel: { formatter: text } }) }, series,
  };
  return <Chart name={name} label={label} height={180} option={option} />;
}

const PARTS = ["forward", "backward", "update", "reduce", "waiting"];
/** What was traced: stages and a step, predicted and measured. */
function Traced({ name, of, waits, goesOn }: { name: string; of: string; waits: boolean; goesOn: boolean }): JSX.Element {
  const answer = useAnswer(async (stop) => (waits ? null : get(`/runs/${name}/comparison`, stop)), `${of} ${waits}`);
  if (waits) return <p class="soft" id="not-traced">{t(goesOn ? "notTraced" : "neverTraced")}</p>;
  if (answer.error) return <p class="soft" id="not-traced">{answer.error}</p>;
  const found = answer.data as Data;
  if (!found) return <Skeleton lines={5} />;
  const colors = kindColors(), fill: Record<string, string> = { forward: colors.F, backward: colors.B, update: colors.update, waiting: colors.idle };
  const both = [found.predicted_step_s, found.measured_step_s], sides = [t("predictedName"), t("measured")];
  return (
    <>
      <Section title={t("stagesBeside")} note={t("besideNote", { steps: found.steps })} tools={<span class="legend">{PARTS.filter((p) => fill[p]).map((p) => <span key={p}><i class="swatch" style={{ background: fill[p] }} />{t(`part_${p}` as Key)}</span>)}</span>}>
        <ol class="beside" id="beside">{found.stages.map((s: Data) => (
          <li key={s.stage}><b><span class="hidden">{t("stage")} </span>{s.stage}</b><span class="soft">{s.layers} · {s.regions.join(", ")}</span>
            {sides.map((side, i) => <div class="beside-line" key={side}><small aria-hidden="true">{side}</small><div class="stack" role="img" aria-label={`${side}: ${PARTS.map((p) => `${t(`part_${p}` as Key)} ${seconds(s[p][i])}`).join(", ")}`}>
              {/* Who waits does so for the rest of the step; medians of the parts need not add up to the median of steps. */}
              {PARTS.filter((p) => fill[p]).map((p) => <i key={p} title={`${t(`part_${p}` as Key)} ${seconds(s[p][i])}`} style={{ flex: p === "waiting" ? "1" : `0 0 ${Math.min(100, (100 * s[p][i]) / both[i])}%`, background: fill[p] }} />)}</div></div>)}</li>))}</ol>
        <details class="as-table"><summary>{t("workersTable")}</summary><Table label={t("stagesBeside")} head={[t("stage"), ...PARTS.map((p) => t(`part_${p}` as Key))]} numeric={PARTS.map((_, i) => i + 1)}
          rows={found.stages.map((s: Data) => [String(s.stage), ...PARTS.map((p) => <>{seconds(s[p][1])} <small class="soft"><span class="hidden">{t("predictedName")} </span>{seconds(s[p][0])}</small></>)])} /></details>
      </Section>
      <Section title={t("timelineBeside")} note={t("timelineBesideNote")} tools={<Legend sends={false} />}>
        {sides.map((side, i) => <div key={side}><div class="section-head"><h3>{side}</h3><span class="soft">{seconds(both[i])}</span></div><OneStep name={name} which={i ? "measured" : "predicted"} of={of} label={side} /></div>)}
      </Section>
    </>
  );
}

function OneStep({ name, which, of, label }: { name: string; which: string; of: string; label: string }): JSX.Element {
  const [now, setNow] = useState<Window | null>(null);
  const [opened, setOpened] = useState<number[]>([]);
  const parts = new URLSearchParams({ which });
  if (now) { parts.set("from_s", String(now.from)); parts.set("to_s", String(now.to)); }
  for (const stage of opened) parts.append("open", String(stage));
  const answer = useAnswer((stop) => get(`/runs/${name}/timeline?${parts}`, stop), `${of} ${parts}`);
  return <Answer of={answer}>{(data: Data) => <Rows name={which} label={label} rows={data.rows} kinds={data.kinds} window={now ?? { from: 0, to: data.step_s }} whole={data.step_s} opened={opened}
    toggle={(stage) => setOpened(opened.includes(stage) ? opened.filter((s) => s !== stage) : [...opened, stage])} setWindow={setNow} />}</Answer>;
}
