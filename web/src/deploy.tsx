// Deploy: files for other systems, what they cannot express, and a folder with all of it.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { blob, copy, download, get, post, type Data } from "./api";
import { mark, unmark } from "./faults";
import { seconds, signed } from "./format";
import { useKept } from "./kept";
import { StopRun, State, steps, Tail, useRun } from "./runs";
import { attempt, go, isUnderWay, notice, once, planId, row, runName, savePlan, shown, view } from "./state";
import { t } from "./strings";
import { WithoutTried } from "./summary";
import { Answer, Empty, Field, number, Section, Skeleton, Table, useAnswer, walks } from "./ui";

const TARGETS: Record<string, string> = { deepspeed: "DeepSpeed", megatron: "Megatron-LM", torchtitan: "torchtitan", torchrun: "torchrun / dist_runner", slurm: "Slurm", kubernetes: "Kubernetes", skypilot: "SkyPilot", tc: "tc" };
const slug = (text: string): string => text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 24) || "plan";

/** Say why something was refused, and mark the field that is wrong; those of a pane may have a prefix of their own. */
const refused = (said: string, say: (text: string) => void, prefix = "") => ({ message }: Error): void => {
  say(message);
  mark(prefix + message, said, true);
};

export function Deploy(): JSX.Element {
  // First for the program that the plan was made for.
  const [chosen, setTarget] = useKept("target", "");
  const target = chosen || (Object.keys(TARGETS).find((x) => String(shown.value.runtime.name).startsWith(x)) ?? "deepspeed");
  const answer = useAnswer((stop) => get(`/plans/${planId.value}/exports/${target}`, stop), `${planId.value} ${target}`);
  return (
    <>
      <WithoutTried words="keepFirst" />
      <Section title={t("target")}>
        <div class="pills" role="group" aria-label={t("target")}>{Object.entries(TARGETS).map(([x, name]) => <button type="button" key={x} id={`target-${x}`} aria-pressed={x === target} onClick={() => setTarget(x)}>{x === "tc" ? t("trafficControl") : name}</button>)}</div>
        <Answer of={answer}>{(data) => (data.target === target ? <Export data={data} /> : <Skeleton lines={8} />)}</Answer>
      </Section>
      <Write key={target} target={target} />
      <Rehearse />
    </>
  );
}

function Export({ data }: { data: Data }): JSX.Element {
  const names = Object.keys(data.files).sort();
  const [file, setFile] = useState("");
  const now = names.includes(file) ? file : names.find((n) => ["ds_config.json", "arguments.txt", "flags.txt"].includes(n)) ?? names[0];
  return (
    <>
      <div id="losses">
        <p aria-live="polite">{t("plannedAndWith", { planned: seconds(data.plan_step_s), now: seconds(data.step_s), target: TARGETS[data.target] })}</p>
        {data.losses.length ? <Table label={t("cannot")} head={[t("cannot"), t("step")]} numeric={[1]} rows={data.losses.map((l: Data) => [l.what, l.cost_s === null ? "—" : signed(l.cost_s, seconds)])} /> : <p class="good">{t("nothingLost")}</p>}
        <p>{t("start")}: <code>{data.start}</code></p>
        <ul class="plain soft">{data.notes.map((n: string) => <li key={n}>{n}</li>)}</ul>
      </div>
      <div class="files">
        {/* One stop of the Tab key: a plan of thousands of devices has a file a node. */}
        <div class="file-list" role="tablist" aria-orientation="vertical" aria-label={t("files")} onKeyDown={walks(names.indexOf(now), names.length, (to) => setFile(names[to]), true)}>{names.map((n) => <button type="button" role="tab" key={n} aria-selected={n === now} aria-controls="file-text" tabIndex={n === now ? 0 : -1} onClick={() => setFile(n)}>{n}</button>)}</div>
        <div><pre tabIndex={0} id="file-text" role="tabpanel" aria-label={now}>{data.files[now]}</pre>
          <div class="row"><button type="button" id="copy" onClick={() => void copy(data.files[now]).then(() => (notice.value = t("copied")))}>{t("copy")}</button><button type="button" onClick={() => download(now, data.files[now])}>{t("download")}</button></div></div>
      </div>
    </>
  );
}

function Write({ target }: { target: string }): JSX.Element {
  const [chosen, setName] = useKept<string | null>(`deployment ${planId.value} ${target}`, null);
  const name = chosen ?? `${slug(shown.value.model)}-${target}`; // while a plan is opened, the one before is shown
  const [hosts, setHosts] = useKept(`hosts ${planId.value}`, "");
  const [result, setResult] = useState<Data>(null);
  const [error, setError] = useState("");
  const written = useAnswer((stop) => get("/deployments", stop), result);
  const [taken, setTaken] = useState("");
  const write = (replace: boolean): void => {
    setError("");
    setTaken("");
    setResult(null);
    unmark();
    void once("deploy", () => post(`/plans/${planId.value}/deploy`, { name, target, hosts, replace })
      .then((made) => setResult({ ...made, made_up: !hosts.trim() }))
      .catch((error: Error & { status?: number }) => {
        refused("deploy-error", setError, "deploy-")(error);
        if (error.status === 409) setTaken(name);
      }));
  };
  const right = result?.checks.every((c: Data) => c.passed);
  const places: Data[] = shown.value.hosts;
  const wanted = places.reduce((sum, place) => sum + place.nodes, 0);
  const lines = hosts.split("\n").filter((line) => line.split("#")[0].trim()).length;
  return (
    <div class="half-half">
      <Section title={t("deployTitle")}>
        <Field label={t("deployName")} path="deploy-name" value={name} mode="text" set={setName} />
        <label class="field"><span>{t("hosts")}</span><textarea id="deploy-hosts" data-path="deploy-hosts" rows={4} value={hosts} onInput={(e) => setHosts(e.currentTarget.value)} /></label>
        <p class="soft" id="hosts-wanted">{t("hostsOf", { n: wanted, places: places.map((p) => `${p.nodes} × ${p.device} · ${p.region}`).join(", ") })}{lines > 0 && <b> {lines} / {wanted}</b>}</p>
        <button class="main" id="deploy" type="button" aria-disabled={isUnderWay("deploy")} onClick={() => write(false)}>{t("deployButton")}</button>
        {error && <p class="error" role="alert" id="deploy-error">{error}</p>}
        {taken && taken === name && <button id="deploy-replace" type="button" aria-disabled={isUnderWay("deploy")} onClick={() => write(true)}>{t("deployReplace")}</button>}
        {result && <div id="deploy-result">
          <p>{t("start")}: <code>cd deployments/{result.folder} &amp;&amp; {result.start}</code></p>
          {result.made_up && <p class="error">{t("madeUpHosts")}</p>}
          <p role="status" class={right ? "good" : "error"}>deployments/{result.folder}/ · {t("files")}: {result.files.length} · {t("checks")}: {t(right ? "passed" : "wrong")}</p>
          <Table label={t("checks")} head={[t("checks"), ""]} rows={result.checks.slice(0, 40).map((c: Data) => [c.what, c.passed ? t("passed") : `${t("wrong")}: ${c.found}`])} />
        </div>}
      </Section>
      <Section title={t("deployments")}><Answer of={written}>{(rows) => rows.length === 0 ? <Empty>{t("noneYet")}</Empty> : <ul class="plain" id="deployments">{rows.map((r: Data) => <li key={r.name}>deployments/{r.folder}/ <small class="soft">{r.files.length}</small> <button type="button" class="small" aria-label={`${t("archiveOf")}: ${r.name}`} onClick={() => void archive(r.name)}>{t("archiveOf")}</button></li>)}</ul>}</Answer></Section>
    </div>
  );
}

// A rehearsal on the server's machine, where its owner lets it; else the commands for another one.
function Rehearse(): JSX.Element {
  const [count, setCount] = useKept("rehearsed-steps", "20");
  const [ranks, setRanks] = useKept("rehearsed-ranks", "4");
  const [started, setStarted] = useState("");
  const [error, setError] = useState("");
  const list = useAnswer((stop) => get("/runs", stop), `${planId.value} ${started}`);
  const name = slug(row.value?.name || shown.value.model);
  const start = (): void => {
    setError("");
    unmark();
    void once("rehearse", () => post(`/plans/${planId.value}/rehearsals`, { name, steps: number(count), ranks: number(ranks) })
      .then((run) => setStarted(run.name)).catch(refused("rehearse-error", setError)));
  };
  return (
    <Section title={t("rehearse")} note={t("rehearseNote")}>
      <Answer of={list}>{(data: Data) => {
        const mine = data.runs.filter((r: Data) => r.plan === planId.value && r.kind === "rehearsal");
        const now = started || mine.find((r: Data) => r.state === "running")?.name || mine[mine.length - 1]?.name || "";
        return <>
          {data.may_start ? <div class="row">
            <Field label={t("rehearseSteps")} path="steps" mode="numeric" value={count} set={setCount} />
            <Field label={t("rehearseRanks")} path="ranks" mode="numeric" value={ranks} set={setRanks} />
            <button type="button" class="main" id="rehearse" aria-disabled={isUnderWay("rehearse")} onClick={start}>{t("rehearseStart")}</button>
          </div> : <><p class="soft">{t("rehearseOff")}</p><pre id="rehearse-commands" tabIndex={0} aria-label={t("rehearse")}>{`python -m runners.launch plan.json --rehearse --max-ranks ${ranks} --steps ${count} --log-dir runs/${name}\npython -m polygon serve --logs runs`}</pre>
            <button type="button" onClick={() => void attempt(savePlan)}>{t("planFile")}</button></>}
          {error && <p class="error" role="alert" id="rehearse-error">{error}</p>}
          {now && <Started name={now} />}
        </>;
      }}</Answer>
    </Section>
  );
}
function Started({ name }: { name: string }): JSX.Element {
  const { run, error } = useRun(name);
  if (error) return <p class="error" role="alert">{error}</p>;
  if (!run) return <Skeleton lines={2} />;
  return (
    <div id="started"><div class="row"><b>{name}</b><State run={run} /><span class="soft">{steps(run)}</span>
      {run.wanted && run.state === "running" && <progress max={run.wanted} value={run.reached} aria-label={t("working")} />}<span class="grow" /><StopRun run={run} />
      <button type="button" class="small" id="beside-it" onClick={() => go(() => { view.value = "runs"; runName.value = name; })}>{t("besideButton")}</button></div>
      {run.log && <Tail text={run.log} />}</div>
  );
}
async function archive(name: string): Promise<void> {
  await attempt(async () => download(`${name}.zip`, await blob(`/deployments/${name}`)));
}
