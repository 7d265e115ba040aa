// Two to four plans side by side: what makes the difference, term by term, and what stands behind it.

import { batch } from "@preact/signals";
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { get, post, type Data } from "./api";
import { kindColors, palette } from "./colors";
import { bytes, digits, percent, seconds, signed, usd } from "./format";
import { called, differences } from "./names";
import { beside, go, jobs, openPlan, planId, planned, row, trouble } from "./state";
import { t, maybe } from "./strings";
import { boundText, energyIfKnown, gapText, perBillion, usdIfKnown, WithoutTried } from "./summary";
import { Legend, Rows, type Window } from "./timeline";
import { Answer, Choice, Empty, Section, Skeleton, Table, useAnswer } from "./ui";

const TERMS = ["compute", "pipeline", "transfer", "reduction", "update"];

/** A plan that stands beside the open one; one that is gone is said to be, and the others stay. */
async function side(id: string, whole: boolean, stop: AbortSignal): Promise<Side | null> {
  try {
    return { id, row: await get(`/jobs/${id}`, stop), v: await post(`/plans/${id}/view${whole ? "" : "?bound=false"}`, {}, stop) };
  } catch (error) {
    if ((error as Data).status !== 404) throw error;
    batch(() => {
      beside.value = beside.value.filter((other) => other !== id);
      trouble.value = t("planGone", { id });
    });
    return null;
  }
}
export function Compare(): JSX.Element {
  const ids = beside.value.filter((id) => id !== planId.value);
  const sides = (whole: boolean) => async (stop: AbortSignal): Promise<Side[]> => (await Promise.all(ids.map((id) => side(id, whole, stop)))).filter((it) => it !== null);
  // What no plan can beat takes seconds: all else is shown meanwhile, as of the open plan.
  const answer = useAnswer(sides(false), ids.join()), whole = useAnswer(sides(true), ids.join());
  const others = (jobs.value ?? []).filter((j: Data) => j.has_plan && j.id !== planId.value && !ids.includes(j.id));
  return (
    <>
      <Section title={t("compare")} note={t("compareHint")} tools={ids.length < 3 && others.length > 0 ? <Choice acts hidden label={t("addPlan")} path="compare" value="" options={[["", t("addPlan")], ...others.map((j: Data): [string, string] => [j.id, `${called(j, jobs.value)} · ${j.note}`])]} set={(id) => id && go(() => (beside.value = [...ids, id]))} /> : undefined}>
        <WithoutTried words="comparedWithout" />
        {ids.length === 0 ? <Empty>{t("compareNone")}</Empty> : <Answer of={answer}>{(all) => {
          // While another is loaded, those that stay.
          const list = all.filter((x) => ids.includes(x.id)).map((x) => whole.data?.find((y) => y.id === x.id) ?? x);
          return list.length ? <Sides list={[{ id: planId.value, row: row.value, v: planned.value }, ...list]} /> : <Skeleton lines={8} />;
        }}</Answer>}
      </Section>
    </>
  );
}

interface Side { id: string; row: Data; v: Data }
function Sides({ list }: { list: Side[] }): JSX.Element {
  const [first] = list;
  const most = Math.max(...list.map((x) => x.v.estimate.step_s));
  const own = (x: Side): string => called(x.row, jobs.value);
  // Plans of one cluster have one name unless somebody gave another.
  const title = (x: Side): string => (list.some((y) => y !== x && own(y) === own(x)) ? `${own(x)} · ${x.row.note}` : own(x));
  // A head is read with every number below it: the name alone.
  const mark = (x: Side, i: number): JSX.Element => <span class="side"><i class="swatch" style={{ background: palette()[i] }} />{title(x)}</span>;
  const name = (x: Side, i: number): JSX.Element => (
    <span class="side"><i class="swatch" style={{ background: palette()[i] }} />{i === 0 ? title(x) : <button type="button" class="link" onClick={() => openPlan(x.id)}>{title(x)}</button>}
      {i > 0 && <button type="button" class="small" aria-label={t("removeOf", { name: own(x) })} onClick={() => go(() => (beside.value = beside.value.filter((id) => id !== x.id)))}>×</button>}</span>
  );
  // Whether less of it is better, or more; of what is neither, no difference is praised.
  type Better = "less" | "more" | "";
  // A step of less work is no better for being shorter.
  const work = (x: Side): string => t("modelSummary", { model: x.v.model, batch: x.v.batch.global_batch, seq: x.v.batch.seq_len });
  const isSame = list.every((x) => work(x) === work(first)), shorter: Better = isSame ? "less" : "";
  const line = (label: string, of: (v: Data) => number, text: (x: number) => string, better: Better = shorter, difference = true): (JSX.Element | string)[] => [label, ...list.map((x, i) => {
    const value = of(x.v), base = of(first.v);
    const other = difference && i > 0 && Math.abs(value - base) > 1e-9 * Math.abs(base) && text(Math.abs(value - base)) !== text(0);
    const good = (better === "less" && value < base) || (better === "more" && value > base);
    return <>{text(value)}{i > 0 && <small class={good ? "delta good" : "delta soft"}>{other ? signed(value - base, text) : ""}</small>}</>;
  })];
  const e = (key: string) => (v: Data): number => v.estimate[key];
  const named = (key: "unpriced" | "unpowered"): string[] => [...new Set(list.flatMap((x) => x.v[key] as string[]))].sort();
  const unpriced = named("unpriced");
  // What nobody said the price of is no cheaper than the rest.
  const costs = (label: string, of: (v: Data) => number, better: Better): (JSX.Element | string)[] => {
    const texts = list.map((x) => usdIfKnown(of(x.v), x.v.unpriced)), known = !unpriced.length;
    return known ? line(label, of, usd, better) : [label, ...texts];
  };
  // Nor does it draw less of which nobody said what it draws.
  const unpowered = named("unpowered"), drawn = !unpowered.length;
  const colors = [kindColors().F, kindColors().idle, kindColors().exposed, kindColors().reduce, kindColors().update];
  return (
    <>
      <ul class="stacks">{list.map((x, i) => (
        <li key={x.id}><div class="limit-head"><b>{name(x, i)}</b><span>{seconds(x.v.estimate.step_s)}</span></div>
          {x.row.parent && x.row.name && <small class="soft">{differences(x.row.changes)}</small>}
          <div class="stack" role="img" aria-label={TERMS.map((k) => `${maybe(`term_${k}`)} ${seconds(x.v.estimate.terms[k])}`).join(", ")} style={{ width: `${(100 * x.v.estimate.step_s) / most}%` }}>{TERMS.map((k, j) => <i key={k} title={`${maybe(`term_${k}`)} ${seconds(x.v.estimate.terms[k])}`} style={{ flexGrow: x.v.estimate.terms[k], background: colors[j] }} />)}</div></li>))}</ul>
      <span class="legend">{TERMS.map((k, j) => <span key={k}><i class="swatch" style={{ background: colors[j] }} />{maybe(`term_${k}`)}</span>)}</span>
      {!isSame && <p class="soft" id="other-work">{t("otherWork")}</p>}
      <h3>{t("whereTime")}</h3>
      <div id="terms"><Table label={t("whereTime")} head={["", ...list.map(mark)]} numeric={list.map((_, i) => i + 1)} rows={[...TERMS.map((k) => line(maybe(`term_${k}`), (v) => v.estimate.terms[k], seconds)), line(t("step"), e("step_s"), seconds)]} /></div>
      <h3>{t("whatElse")}</h3>
      <Table label={t("whatElse")} head={["", ...list.map(mark)]} numeric={list.map((_, i) => i + 1)} rows={[
        ...(isSame ? [] : [[t("work"), ...list.map((x) => <span class="side">{work(x)}</span>)]]),
        costs(t("cost"), e("cost_usd"), shorter), costs(t("perBillionUsd"), (v) => perBillion(v.estimate), "less"), line(t("tokens"), e("tokens_per_s"), digits, "more"), [t("gap"), ...list.map((x) => <>{gapText(x.v.estimate, x.row)} <small class="soft">{boundText(x.v.estimate, x.row)}</small></>)], line(t("mfu"), e("mfu"), percent, "more", false),
        line(t("devicesUsed"), (v) => v.devices.used, digits, ""), line(t("stagesCount"), (v) => v.stages.length, digits, ""), line(t("microBatches"), (v) => v.micro_batches, digits, ""),
        line(t("across"), (v) => v.traffic.cross_region_bytes, bytes), line(t("ppTraffic"), (v) => v.traffic.pp_bytes, bytes), line(t("dpTraffic"), (v) => v.traffic.dp_bytes, bytes), line(t("tpTraffic"), (v) => v.traffic.tp_bytes, bytes), line(t("exposedTime"), (v) => v.traffic.exposed_s, seconds), line(t("energy"), e("energy_j"), energyIfKnown, drawn ? shorter : "", drawn)]} />
      {unpriced.length > 0 && <p class="soft">{t("noPrice", { devices: unpriced.join(", ") })}</p>}
      {!drawn && <p class="soft">{t("noPower", { devices: unpowered.join(", ") })}</p>}
      <h3>{t("stages")}</h3>
      {list.map((x, i) => <ol class="mini-strip" key={x.id} aria-label={own(x)}>{x.v.stages.map((s: Data, k: number) => <li key={k} style={{ borderColor: palette()[i] }} title={s.workers.map((w: Data) => `${w.region}: ${w.workers} × ${w.tp} ${w.device}`).join("; ")}><b>{k}</b> {s.layers}<small>{[...new Set(s.workers.map((w: Data) => w.region))].join(", ")}</small></li>)}</ol>)}
      <Timelines list={list} most={most} name={name} />
    </>
  );
}

// The predicted steps below one another, on one scale; zoomed together.
function Timelines({ list, most, name }: { list: Side[]; most: number; name: (x: Side, i: number) => JSX.Element }): JSX.Element {
  const [window_, setWindow] = useState<Window | null>(null);
  const answer = useAnswer(async (stop) => new Map(await Promise.all(list.map(async ({ id, v }): Promise<[string, Data]> => {
    const to = Math.min(window_?.to ?? Infinity, v.estimate.step_s);
    // A plan that has ended before the window begins has nothing in it.
    if (window_ && window_.from >= to) return [id, null];
    return [id, await post(`/plans/${id}/timeline${window_ ? `?from_s=${window_.from}&to_s=${to}` : ""}`, {}, stop)];
  }))), `${list.map((x) => x.id).join()} ${window_?.from} ${window_?.to}`);
  return (
    <section class="section" id="timelines" aria-label={t("gantt")}>
      <div class="section-head"><h3>{t("gantt")}</h3><span class="soft">{t("oneScale")}</span><span class="grow" />{window_ && <button type="button" class="small" onClick={() => setWindow(null)}>{t("wholeStep")}</button>}</div>
      <Legend sends={false} />
      <Answer of={answer} lines={8}>{(found) => list.map((x, i) => (
        <div key={x.id}><div class="limit-head"><b>{name(x, i)}</b><span>{seconds(x.v.estimate.step_s)}</span></div>
          {found.get(x.id) && <Rows name={`gantt-${i}`} label={`${t("gantt")}: ${called(x.row, jobs.value)}`} rows={found.get(x.id).rows} kinds={found.get(x.id).kinds} window={window_ ?? { from: 0, to: most }} whole={most} opened={[]} setWindow={setWindow} ends={x.v.estimate.step_s} regions={x.v.regions.map((r: Data) => r.name)} />}</div>))}</Answer>
    </section>
  );
}
