// The goal: what is best, how long to search, and what a plan must keep.

import type { JSX } from "preact";
import type { Data } from "./api";
import { draft, edit } from "./draft";
import { fold, folds } from "./faults";
import { catalogue } from "./state";
import { maybe, t } from "./strings";
import { Chips, Choice, Field, Fold, number, type Allowed } from "./ui";

const OBJECTIVES = ["time", "money", "energy", "tokens-per-usd"];

export function Goal(): JSX.Element {
  const d = draft.value, c = d.constraints;
  const regions: string[] = d.cluster.regions.map((r: Data) => String(r.name));
  const types = [...new Set<string>(d.cluster.regions.flatMap((r: Data) => r.nodes.map((n: Data) => String(n.device))))];
  // What is empty is not said at all, so that a default stays one.
  const set = (key: string, value: Data): void => edit((it) => {
    if (value === "" || (Array.isArray(value) && value.length === 0)) delete it.constraints[key];
    else it.constraints[key] = value;
  }, `constraints.${key}`);
  const single = (key: string, label: string, allowed: Allowed, unit = ""): JSX.Element => <Field label={label} path={`constraints.${key}`} value={c[key] ?? ""} unit={unit} allowed={{ ...allowed, optional: true }} placeholder={key === "memory_headroom" ? "0.08" : t("noLimit")} set={(v) => set(key, v.trim() === "" ? "" : number(v))} />;
  const list = (key: string, label: string, options: string[]): JSX.Element => <Chips label={label} path={`constraints.${key}`} options={options} chosen={(c[key] ?? []).map(String)} set={(v) => set(key, key === "local_steps" ? v.map(Number) : v)} />;
  const bounds = Object.keys(c).length;
  return (
    <Fold id="goal" title={t("goal")} summary={`${maybe(`objective_${d.objective}`)} · ${maybe(d.effort)}${bounds ? ` · ${t("nBounds", { n: bounds })}` : ""}`}>{() => <>
      <Choice label={t("objective")} path="objective" value={d.objective} options={OBJECTIVES.map((o): [string, string] => [o, maybe(`objective_${o}`)])} set={(v) => edit((it) => { it.objective = v; })} />
      <div class="two"><Choice label={t("effort")} path="effort" value={d.effort} options={["quick", "thorough", "long"].map((e): [string, string] => [e, maybe(e)])} set={(v) => edit((it) => { it.effort = v; })} />
        <Field label={t("seed")} path="seed" value={d.seed} mode="numeric" allowed={{ whole: true, least: 0, most: 2 ** 31 }} set={(v) => edit((it) => { it.seed = number(v); }, "seed")} /></div>
      <details class="more" open={folds.value.constraints === true} onToggle={(e) => fold("constraints", e.currentTarget.open)}><summary>{t("constraints")}</summary>
        <div class="two">{single("most_usd_per_step", t("maxCost"), { above: 0 }, "$")}{single("most_usd_per_hour", t("maxCostHour"), { above: 0 }, "$/h")}</div>
        <div class="two">{single("most_step_s", t("maxStep"), { above: 0 }, "s")}{single("most_stages", t("maxStages"), { whole: true, least: 1 })}</div>
        {single("memory_headroom", t("headroom"), { least: 0, below: 1 })}
        <Choice label={t("parity")} path="constraints.parity" value={c.parity ?? "safe"} options={(catalogue.value?.parity_levels ?? ["safe"]).map((p: string): [string, string] => [p, maybe(`parity_${p}`)])} set={(v) => set("parity", v === "safe" ? "" : v)} />
        {list("compressions", t("packings"), catalogue.value?.compressions ?? [])}
        {list("local_steps", t("localStepsAllowed"), (catalogue.value?.local_steps ?? []).map(String))}
        {list("forbidden_regions", t("forbidden"), regions)}
        {list("forbidden_devices", t("forbiddenDevices"), types)}
        {list("first_stage_regions", t("firstStage"), regions)}
        {list("last_stage_regions", t("lastStage"), regions)}
        <Rules regions={regions} />
        <h3>{t("egressCap")}</h3>
        <div class="two">{[...new Set(["*", ...regions, ...Object.keys(c.egress_bytes_per_step ?? {})])].map((name) => <Egress key={name} name={name} isThere={regions.includes(name)} />)}</div>
      </details>
    </>}</Fold>
  );
}

function Egress({ name, isThere }: { name: string; isThere: boolean }): JSX.Element {
  const caps = draft.value.constraints.egress_bytes_per_step ?? {};
  const set = (text: string): void => edit((it) => {
    const next = { ...(it.constraints.egress_bytes_per_step ?? {}) };
    const value = number(text);
    if (text.trim() === "") delete next[name];
    else next[name] = typeof value === "number" ? value * 1e9 : value;
    if (Object.keys(next).length) it.constraints.egress_bytes_per_step = next;
    else delete it.constraints.egress_bytes_per_step;
  }, `egress.${name}`);
  const now = caps[name];
  return <Field label={name === "*" ? t("everyRegion") : isThere ? name : `${name} ${t("notThere")}`} path={`constraints.egress_bytes_per_step.${name}`} unit="GB" allowed={{ least: 0, optional: true }} value={typeof now === "number" ? now / 1e9 : now ?? ""} placeholder={t("noLimit")} set={set} />;
}

function Rules({ regions }: { regions: string[] }): JSX.Element {
  const rules: Data[] = draft.value.constraints.stage_rules ?? [];
  const change = (work: (rules: Data[]) => void, of = ""): void => edit((it) => {
    const next = [...(it.constraints.stage_rules ?? [])];
    work(next);
    if (next.length) it.constraints.stage_rules = next;
    else delete it.constraints.stage_rules;
  }, of);
  return (
    <div><h3>{t("stageRules")}</h3>
      {rules.map((rule, i) => {
        const kind = rule.never_regions?.length ? "never_regions" : "only_regions" in rule ? "only_regions" : "never_regions";
        const at = `constraints.stage_rules[${i}]`;
        return (
          <div class="rule" key={i}>
            <div class="row"><Field label={t("ruleStage")} path={`${at}.stage`} value={rule.stage} mode="numeric" allowed={{ whole: true }} set={(v) => change((r) => { r[i] = { ...r[i], stage: number(v) }; }, `${at}.stage`)} />
              <Choice label={t("ruleKind")} path={`${at}.kind`} value={kind} options={[["only_regions", t("ruleOnly")], ["never_regions", t("ruleNever")]]} set={(v) => change((r) => { r[i] = { stage: rule.stage, [v]: rule[kind] ?? [] }; })} />
              <button type="button" class="small" aria-label={`${t("remove")} ${i + 1}`} onClick={() => change((r) => { r.splice(i, 1); })}>×</button></div>
            <Chips label={t("regions")} path={`${at}.${kind}`} options={regions} chosen={rule[kind] ?? []} set={(v) => change((r) => { r[i] = { stage: rule.stage, [kind]: v }; })} />
          </div>
        );
      })}
      <button type="button" id="add-rule" onClick={() => change((r) => { r.push({ stage: 0, only_regions: [] }); })}>{t("addRule")}</button></div>
  );
}
