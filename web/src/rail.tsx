// The left rail: what is asked, in three summaries that open, the button that plans, and the plans so far.

import type { JSX } from "preact";
import { useRef, useState } from "preact/hooks";
import { call, download, get, post, type Data } from "./api";
import { changed, devicesIn, draft, edit, filledIn, onceHere } from "./draft";
import { digits, gbps, moment, percent } from "./format";
import { FileFault } from "./faults";
import { Goal } from "./goal";
import { useKept } from "./kept";
import { called, differences } from "./names";
import { arriving, attempt, beside, catalogue, ended, go, isUnderWay, jobId, jobs, loadJobs, notice, once, open, openMade, openPlan, planId, progress, row, running, search, takeAskedOf, trouble, view, workNote } from "./state";
import { StopJob } from "./stop";
import { language, maybe, programName, t } from "./strings";
import { Choice, Empty, Field, Fold, Key, Menu, number, Skeleton, Upload } from "./ui";

/** Another cluster by its name; bounds that were set for the one before go with it, those set meanwhile stay. */
function takeInstance(name: string): Promise<void> {
  const before = draft.value.constraints;
  return attempt(() => onceHere("cluster", get(`/instances/${name}`), (cluster) => edit((d) => {
    d.cluster = cluster;
    d.constraints = Object.fromEntries(Object.entries(d.constraints).filter(([key, value]) => JSON.stringify(value) !== JSON.stringify(before[key])));
  })));
}

export function Rail(): JSX.Element {
  const filled = useRef(false); // where plan follows plan, the fields stay where they are
  filled.current ||= catalogue.value !== null && !arriving.value;
  return (
    <aside class="rail" aria-label={t("asked")}>
      {!filled.current ? <Skeleton lines={8} /> : <>
        <div class="rail-scroll">
          <ClusterSummary />
          <ModelSummary />
          <Goal />
          <Plans />
        </div>
        <Plan />
      </>}
    </aside>
  );
}

/** What a file says; a fault in it is said with its name. */
const readOf = async (kind: string, text: Promise<string>, file: string): Promise<Data> =>
  post("/read", { kind, text: await text, name: file.replace(/\.\w+$/, "").slice(0, 120) || "upload" }).catch((error: Error) => { throw new FileFault(file, error); });
async function planOf(file: Promise<string>): Promise<Data> {
  const text = await file;
  try {
    const found = JSON.parse(text);
    if (found?.constructor === Object) return found;
  } catch {
    // said below: to who opened a picture it is all the same
  }
  throw new Error(t("noPlanFile"));
}
/** Take a cluster's file, and tell of the links between regions that nobody gave. */
export function readCluster(text: Promise<string>, file: string): Promise<void> {
  return attempt(() => onceHere("cluster", readOf("cluster", text, file), (cluster) => {
    edit((d) => { d.cluster = cluster; });
    const n = filledIn();
    if (n) notice.value = t("linksFilled", { n, rate: gbps(catalogue.value.between_gbps) });
  }));
}
function ClusterSummary(): JSX.Element {
  const c = draft.value.cluster;
  const known = catalogue.value?.instances ?? [];
  return (
    <Fold id="cluster" title={t("cluster")} summary={c.regions.length ? t("clusterSummary", { n: digits(c.regions.reduce((n: number, r: Data) => n + devicesIn(r), 0)), regions: c.regions.length }) : t("noRegions")}
      tools={<button type="button" class="small" id="edit-cluster" aria-label={`${t("edit")}: ${t("cluster")}`} aria-pressed={view.value === "cluster"} onClick={() => open(view.value === "cluster" ? "overview" : "cluster")}>{t("edit")}</button>}>{() => <>
      <Choice acts label={t("instance")} path="instance" value="" options={[["", t("choose")], ...known.map((n: string): [string, string] => [n, n])]}
        set={(name) => name && void takeInstance(name)} />
      <div class="row"><Upload label={t("upload")} id="upload-cluster" take={(text, file) => void readCluster(text, file)} />
        <button type="button" id="by-hand" onClick={() => { edit((d) => { d.cluster = { name: "mine", regions: [] }; d.constraints = {}; }); open("cluster"); }}>{t("byHand")}</button></div>
    </>}</Fold>
  );
}

const MOST_SEQUENCES = 10_000_000; // as polygon/domain/model.py
function ModelSummary(): JSX.Element {
  const d = draft.value;
  const models: Data[] = catalogue.value?.models ?? [];
  const name = typeof d.model === "string" ? d.model : d.model.name;
  const own: [string, string][] = typeof d.model === "string" ? [] : [[name, name]];
  const setBatch = (key: string, text: string): void => edit((it) => { it.batch[key] = number(text); }, `batch.${key}`);
  const choose = (chosen: string): void => {
    const found = models.find((m) => m.name === chosen);
    if (found) edit((it) => { it.model = chosen; it.batch.seq_len = found.tokens_per_image || Math.min(found.max_seq_len, Number(it.batch.seq_len) || 2048); });
  };
  return (
    <Fold id="model" title={t("work")} summary={t("modelSummary", { model: name, batch: d.batch.global_batch, seq: d.batch.seq_len })}>{() => <>
      <Choice label={t("model")} path="model" value={name} options={[...own, ...models.map((m): [string, string] => [m.name, `${m.name} · ${digits(m.parameters / 1e9)} B`])]} set={choose} />
      <Upload label={t("uploadModel")} id="upload-model" take={(text, file) => void attempt(() => onceHere("model", readOf("model", text, file), (model) => edit((it) => { it.model = model; })))} />
      <button type="button" id="export-model" onClick={() => void attempt(async () => download("config.json", JSON.stringify(await post("/config", { model: d.model }), null, 2), "application/json"))}>{t("exportModel")}</button>
      <div class="two"><Field label={t("globalBatch")} path="batch.global_batch" value={d.batch.global_batch} mode="numeric" allowed={{ whole: true, least: 1, most: MOST_SEQUENCES }} set={(v) => setBatch("global_batch", v)} />
        <Field label={t("seqLen")} path="batch.seq_len" value={d.batch.seq_len} mode="numeric" allowed={{ whole: true, least: 1 }} set={(v) => setBatch("seq_len", v)} /></div>
      <div class="two"><Choice label={t("precision")} path="batch.precision" value={d.batch.precision ?? "bf16"} options={["bf16", "fp16", "fp32", "tf32", "fp8"].map((p): [string, string] => [p, p])} set={(v) => edit((it) => { it.batch.precision = v; })} />
        <Choice label={t("optimizer")} path="batch.optimizer" value={d.batch.optimizer ?? "adamw"} options={(catalogue.value?.optimizers ?? []).map((o: Data): [string, string] => [o.name, o.label])} set={(v) => edit((it) => { it.batch.optimizer = v; })} /></div>
      <Choice label={t("runtime")} path="runtime" value={d.runtime.name ?? d.runtime} options={(catalogue.value?.runtimes ?? []).map((r: Data): [string, string] => [r.name, programName(r)])} set={(v) => edit((it) => { it.runtime = v; })} />
    </>}</Fold>
  );
}

function Plan(): JSX.Element {
  const p = progress.value;
  return (
    <div class="rail-foot" id="status">
      {p ? <>
        <div class="row"><progress max={1} value={p.state === "queued" ? undefined : p.progress} aria-label={t("working")} /><StopJob id="cancel" job={jobId.value} /></div>
        <small class="soft">{workNote(p)}</small>
        <Differs of={jobId.value} />
      </> : <>
        <button type="button" class="main wide" id="calculate" disabled={draft.value.cluster.regions.length === 0} aria-disabled={isUnderWay("search")} onClick={() => void search()}>{t("calculate")}<Key keys="⌘⏎" /></button>
        {planId.value && <Differs of={planId.value} />}
      </>}
    </div>
  );
}

/** What is asked here is not what a plan or a search was asked for, which can be taken over. */
const Differs = ({ of }: { of: string }): JSX.Element | null =>
  changed.value ? <small class="soft">{t("draftDiffers")} <button type="button" class="link" onClick={() => void attempt(async () => void (await takeAskedOf(of)))}>{t("takePlans")}</button></small> : null;

function Plans(): JSX.Element {
  const [filter, setFilter] = useKept("filter", "");
  const [old, setOld] = useKept("archive", false);
  // On a narrow screen the plan itself comes before the others.
  const [closed, setClosed] = useState(planId.value !== "");
  const rows = (jobs.value ?? []).filter((j: Data) => j.archived === old && [called(j, jobs.value), ...j.tags].join(" ").toLowerCase().includes(filter.toLowerCase()));
  // What a plan was varied into stands below it.
  const listed = new Set(rows.map((j: Data) => j.id));
  const ordered = (under: string): Data[] =>
    rows.filter((j: Data) => (listed.has(j.parent) ? j.parent : "") === under).flatMap((j: Data) => [j, ...ordered(j.id)]);
  return (
    <section class={closed ? "plans closed" : "plans"} aria-label={t("plans")}>
      <div class="fold-head"><button type="button" class="narrow" aria-label={t("plans")} aria-expanded={!closed} onClick={() => setClosed(!closed)}>{closed ? "▸" : "▾"}</button><h2>{t("plans")}</h2><span class="grow" />
        <Menu label="⋯" id="plans-menu" name={t("plansMenu")}>{(close) => <>
          <Upload label={t("openPlan")} id="upload-plan" take={(text, file) => { close(); void attempt(() => openMade(async () => planOf(text).then((plan) => post("/plans", plan)).catch((error: Error) => { throw new FileFault(file, error); }))); }} />
          <button type="button" onClick={() => { setOld(!old); close(); }}>{t(old ? "showCurrent" : "showArchive")}</button>
        </>}</Menu></div>
      {(jobs.value?.length ?? 0) > 6 && <input class="filter" type="search" aria-label={t("filter")} placeholder={t("filter")} value={filter} onInput={(e) => setFilter(e.currentTarget.value)} />}
      {jobs.value === null ? <Skeleton /> : rows.length === 0 ? <Empty>{t("noneYet")}</Empty> : <ul id="plan-list">{ordered("").slice(0, 60).map((j: Data) => <PlanRow key={j.id} j={j} />)}</ul>}
    </section>
  );
}

const label = (id: string, said: Data, then?: () => void): Promise<void> => once(`label ${id} ${Object.keys(said)}`, () => attempt(async () => {
  await call("PATCH", `/jobs/${id}`, said);
  if (row.value?.id === id) row.value = { ...row.value, ...said };
  then?.();
  await loadJobs();
}));
/** Forget a plan or a search; who has gone on from it meanwhile stays there. */
const forget = (id: string): Promise<void> => once(`forget ${id}`, () => attempt(async () => {
  await call("DELETE", `/plans/${id}`);
  go(() => {
    if (planId.value === id) planId.value = "";
    if (jobId.value === id) jobId.value = "";
    beside.value = beside.value.filter((other) => other !== id);
  });
  await loadJobs();
}));
function PlanRow({ j }: { j: Data }): JSX.Element {
  const [naming, setNaming] = useKept<{ name: string; tags: string } | null>(`naming ${j.id}`, null);
  const here = j.id === planId.value, name = called(j, jobs.value);
  const openIt = (): void => {
    if (j.kind === "front") { sessionStorage.setItem("polygon-front", j.id); open("front"); }
    else if (running(j)) go(() => (jobId.value = j.id));
    else if (j.has_plan) openPlan(j.id, view.value === "cluster" ? "overview" : view.value);
    else void attempt(async () => { if (await takeAskedOf(j.id)) trouble.value = ended(j); }); // what was asked, to be asked otherwise
  };
  const note = running(j) ? `${maybe(`state_${j.state}`)} ${percent(j.progress)}` : j.kind === "front" ? t("front") : j.has_plan ? j.note : maybe(`state_${j.state}`);
  const typed = useRef(naming);
  typed.current = naming;
  // What was typed stays until it is kept: it may be refused, and somebody may type on.
  const submit = (e: Event): void => {
    e.preventDefault();
    const { tags } = naming!;
    void label(j.id, { name: naming!.name, tags: [...new Set(tags.split(",").map((x) => x.trim()).filter(Boolean))] }, () => { if (typed.current === naming) setNaming(null); });
  };
  if (naming)
    return (
      <li class="naming"><form onSubmit={submit} onKeyDown={(e) => { if (e.key === "Escape") setNaming(null); }}>
        <label class="field"><span>{t("name")}</span><input name="name" value={naming.name} placeholder={j.name ? undefined : name} maxLength={120} onInput={(e) => setNaming({ ...naming, name: e.currentTarget.value })} /></label><label class="field"><span>{t("tags")}</span><input name="tags" value={naming.tags} onInput={(e) => setNaming({ ...naming, tags: e.currentTarget.value })} /></label>
        <div class="row"><button class="main">{t("ok")}</button><button type="button" onClick={() => setNaming(null)}>{t("close")}</button></div></form></li>
    );
  return (
    <li class={here ? "here" : undefined}>
      <button type="button" class="plan" aria-current={here ? "page" : undefined} onClick={openIt} title={j.error || name}>
        <span class="plan-name">{j.parent ? "↳ " : ""}{j.parent && !j.name ? differences(j.changes) : name}</span>
        <small><b>{note}</b> {moment(j.created_s, language.value === "zh")} {j.tags.map((x: string) => <i class="tag" key={x}>{x}</i>)}</small>
      </button>
      <Menu label="⋯" name={t("actionsOf", { name })}>{(close) => <>
        <button type="button" onClick={() => { close(); setNaming({ name: j.name, tags: j.tags.join(", ") }); }}>{t("rename")}</button>
        {j.has_plan && planId.value && !here && <button type="button" onClick={() => { close(); go(() => { beside.value = [...beside.value.filter((x) => x !== j.id), j.id].slice(-3); view.value = "compare"; }); }}>{t("compareWith")}</button>}
        <button type="button" onClick={() => { close(); void label(j.id, { archived: !j.archived }); }}>{t(j.archived ? "unarchive" : "archive")}</button>
        <button type="button" class="danger" onClick={() => { close(); if (confirm(t("deleteSure", { name }))) void forget(j.id); }}>{t("delete")}</button>
      </>}</Menu>
    </li>
  );
}
