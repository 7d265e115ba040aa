// Time against money: plans of which none is beaten in both, from a search of their own; a point opens its plan.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { get, patiently, post, type Data } from "./api";
import { axis, Chart, tooltip } from "./chart";
import { ink, palette } from "./colors";
import { draft } from "./draft";
import { seconds } from "./format";
import { attempt, follow, isUnderWay, loadJobs, once, openMade, outcome, requested, running, timeLeft, workNote } from "./state";
import { StopJob } from "./stop";
import { t } from "./strings";
import { isPriceKnown, Unsaid, usdIfKnown } from "./summary";
import { Empty, Section, Skeleton, Table } from "./ui";

const KEY = "polygon-front";
/** Between two looks at the points that a search has found so far. */
const LOOK_MS = 1000;

export function Front(): JSX.Element {
  const [job, setJob] = useState(sessionStorage.getItem(KEY) ?? "");
  const [data, setData] = useState<Data>(null);
  const [error, setError] = useState("");
  useEffect(() => {
    const stop = new AbortController();
    setError("");
    if (!job) return;
    const load = async (): Promise<void> => {
      const found = await get(`/fronts/${job}`, stop.signal);
      setData(found);
      if (!running(found)) return;
      const left = timeLeft(), looks = new AbortController();
      let looked = 0;
      await follow(`/jobs/${job}`, stop.signal, (now) => {
        if (!running(now)) return; // its end comes with all points
        setData((old: Data) => ({ ...old, ...now, left_s: left(now.progress) }));
        if (Date.now() - looked < LOOK_MS) return;
        looked = Date.now();
        get(`/fronts/${job}`, looks.signal).then((so: Data) => { if (!looks.signal.aborted && !stop.signal.aborted) setData((old: Data) => ({ ...old, points: so.points })); }, () => undefined);
      });
      looks.abort(); // one that is late knows fewer points
      const ended = await get(`/fronts/${job}`, stop.signal);
      setData(ended);
      if (ended.points?.length) outcome.value = t("frontFound", { n: ended.points.length });
      await loadJobs();
    };
    patiently(load).catch((e: Error) => { if (!stop.signal.aborted) { setError(e.message); sessionStorage.removeItem(KEY); } });
    return () => stop.abort();
  }, [job]);
  const start = (): Promise<void> => once("front", () => attempt(async () => {
    const begun = await post("/fronts", await requested());
    sessionStorage.setItem(KEY, begun.id);
    outcome.value = t("working");
    setData(begun);
    setJob(begun.id);
    await loadJobs();
  }));
  const open = (index: number): Promise<void> => once("point", () => attempt(() =>
    openMade(() => post(`/fronts/${job}/points/${index}?step_s=${data.points[index].step_s}`, {}))));
  const busy = data && running(data);
  return (
    <Section title={t("front")} note={t("frontHint")} tools={busy ? <StopJob job={job} /> : <button type="button" class="main" id="start-front" disabled={draft.value.cluster.regions.length === 0} aria-disabled={isUnderWay("front")} onClick={() => void start()}>{t(job ? "searchAgain" : "startFront")}</button>}>
      {error && <p class="error" role="alert">{error}</p>}
      {busy && <div class="row middle"><progress max={1} value={data.progress} aria-label={t("working")} /><span class="soft">{workNote(data)}</span></div>}
      {!job ? <Empty>{t("frontNone")}</Empty> : !data ? <Skeleton lines={6} /> : data.points?.length ? <Points points={data.points} open={(i) => void open(i)} /> : busy ? <Skeleton lines={6} /> : <p class="error">{data.error}</p>}
    </Section>
  );
}

function Points({ points, open }: { points: Data[]; open: (index: number) => void }): JSX.Element {
  const drawn = points.flatMap((p, i) => (isPriceKnown(p.usd, p.unpriced) ? [{ i, at: [p.step_s, p.usd] }] : []));
  const option = {
    tooltip: tooltip(), grid: { left: 60, right: 24, top: 30, bottom: 44 },
    xAxis: { type: "value", scale: true, name: `${t("step")} (s)`, nameLocation: "middle", nameGap: 26, ...axis() }, yAxis: { type: "value", scale: true, name: t("cost"), ...axis() },
    series: [{ type: "line", step: "end", symbolSize: 11, lineStyle: { color: ink().line }, itemStyle: { color: palette()[0] }, data: drawn.map(({ at }) => at) }],
  };
  return (
    <>
      {drawn.length > 0 && <Chart name="front" label={t("front")} height={320} option={option} onClick={(index) => open(drawn[index].i)} />}
      <Unsaid devices={[...new Set<string>(points.flatMap((p) => p.unpriced ?? []))].sort()} />
      <Table label={t("front")} head={[t("step"), t("cost"), t("devices"), t("stagesCount"), ""]} numeric={[0, 1, 2, 3]} rows={points.map((p, i) => [seconds(p.step_s), usdIfKnown(p.usd, p.unpriced), p.devices, p.stages, <button type="button" class="small" aria-label={`${t("open")}: ${seconds(p.step_s)}, ${usdIfKnown(p.usd, p.unpriced)}`} onClick={() => open(i)}>{t("open")}</button>])} />
    </>
  );
}
