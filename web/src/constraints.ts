// Constraints of a plan as fields, and the validator's messages at the fields that they name.

import type { Data } from "./api";
import { choice, chips, field, h, number } from "./dom";
import { state } from "./state";
import { maybe, t } from "./strings";

export const limits: Data = { memory_headroom: 0.08, parity: "safe", compressions: [], local_steps: [], forbidden_regions: [], forbidden_devices: [], first_stage_regions: [], last_stage_regions: [], most_usd_per_step: "", most_usd_per_hour: "", most_step_s: "", most_stages: "", stage_rules: [], egress: {} };
const NUMBERS = ["most_usd_per_step", "most_usd_per_hour", "most_step_s", "most_stages"];
const REGION_LISTS = ["forbidden_regions", "first_stage_regions", "last_stage_regions"];

const names = (cluster: Data): string[] => cluster.regions.map((r: Data) => String(r.name));
const types = (cluster: Data): string[] => [...new Set<string>(cluster.regions.flatMap((r: Data) => r.nodes.map((n: Data) => String(n.device))))];

export function constraintFields(cluster: Data, redraw: () => void): HTMLElement {
  const single = (key: string, label: string): HTMLElement => field(label, `constraints.${key}`, limits[key], (v) => (limits[key] = v), { inputmode: "decimal", placeholder: t("noLimit") });
  const list = (key: string, label: string, options: string[]): HTMLElement => chips(label, `constraints.${key}`, options, limits[key], (v) => (limits[key] = v));
  const egress = (name: string, label: string): HTMLElement => field(label, `constraints.egress_bytes_per_step.${name}`, limits.egress[name] ?? "", (v) => (limits.egress[name] = v), { inputmode: "decimal", placeholder: t("noLimit") });
  const open = limits.stage_rules.length > 0 || Object.values(limits.egress).some((v) => v !== "");
  return h("div", {},
    h("div", { class: "fields" }, single("memory_headroom", t("headroom")), single("most_usd_per_step", t("maxCost")), single("most_usd_per_hour", t("maxCostHour")), single("most_step_s", t("maxStep")), single("most_stages", t("maxStages")),
      h("div", { class: "double" }, choice(t("parity"), "constraints.parity", limits.parity, state.catalogue.parity_levels.map((p: string): [string, string] => [p, maybe(`parity_${p}`)]), (v) => (limits.parity = v)))),
    list("compressions", t("packings"), state.catalogue.compressions),
    list("local_steps", t("localStepsAllowed"), state.catalogue.local_steps.map(String)),
    list("forbidden_regions", t("forbidden"), names(cluster)),
    list("forbidden_devices", t("forbiddenDevices"), types(cluster)),
    h("details", { open: open || limits.first_stage_regions.length + limits.last_stage_regions.length > 0, id: "more-limits" }, h("summary", {}, t("residency")),
      list("first_stage_regions", t("firstStage"), names(cluster)), list("last_stage_regions", t("lastStage"), names(cluster)),
      h("h3", {}, t("stageRules")), limits.stage_rules.map((rule: Data, i: number) => ruleFields(cluster, rule, i, redraw)),
      h("button", { type: "button", id: "add-rule", onclick: () => { limits.stage_rules.push({ stage: 0, only_regions: [], never_regions: [] }); redraw(); } }, t("addRule")),
      h("h3", {}, t("egressCap")), h("div", { class: "fields" }, egress("*", t("everyRegion")), names(cluster).map((name) => egress(name, name)))));
}

function ruleFields(cluster: Data, rule: Data, i: number, redraw: () => void): HTMLElement {
  const at = `constraints.stage_rules[${i}]`;
  const kind = rule.never_regions.length ? "never_regions" : rule.kind ?? "only_regions";
  const other = kind === "only_regions" ? "never_regions" : "only_regions";
  return h("div", { class: "rule" }, h("div", { class: "row" },
    field(t("ruleStage"), `${at}.stage`, rule.stage, (v) => (rule.stage = number(v)), { inputmode: "numeric" }),
    choice(t("ruleKind"), `${at}.kind`, kind, [["only_regions", t("ruleOnly")], ["never_regions", t("ruleNever")]], (v) => { rule[v] = rule[kind]; rule[kind] = []; rule.kind = v; redraw(); }),
    h("button", { type: "button", class: "small", "aria-label": `${t("remove")} ${i + 1}`, onclick: () => { limits.stage_rules.splice(i, 1); redraw(); } }, "×")),
    chips(t("regions"), `${at}.${kind}`, names(cluster), rule[kind], (v) => { rule[kind] = v; rule[other] = []; }));
}

// What a problem file says, into the fields.
export function fillLimits(said: Data): void {
  for (const key of Object.keys(limits)) if (key !== "egress") limits[key] = said[key] ?? (NUMBERS.includes(key) ? "" : key === "memory_headroom" ? 0.08 : key === "parity" ? "safe" : []);
  limits.local_steps = limits.local_steps.map(String);
  limits.stage_rules = limits.stage_rules.map((r: Data) => ({ stage: r.stage, only_regions: r.only_regions ?? [], never_regions: r.never_regions ?? [] }));
  limits.egress = Object.fromEntries(Object.entries<number>(said.egress_bytes_per_step ?? {}).map(([name, n]) => [name, String(n / 1e9)]));
}

// What the problem file says; names that the cluster has no more are left out.
export function constraints(cluster: Data): Data {
  const known = new Set(names(cluster)), devices = new Set(types(cluster));
  const result: Data = { memory_headroom: typeof limits.memory_headroom === "number" ? limits.memory_headroom : number(limits.memory_headroom), parity: limits.parity, compressions: limits.compressions, local_steps: limits.local_steps.map(Number) };
  for (const key of NUMBERS) if (String(limits[key]).trim() !== "") result[key] = number(String(limits[key]));
  for (const key of REGION_LISTS) result[key] = limits[key].filter((n: string) => known.has(n));
  result.forbidden_devices = limits.forbidden_devices.filter((n: string) => devices.has(n));
  result.stage_rules = limits.stage_rules.map((r: Data) => ({ stage: r.stage, only_regions: r.only_regions.filter((n: string) => known.has(n)), never_regions: r.never_regions.filter((n: string) => known.has(n)) }));
  const caps = Object.entries<string>(limits.egress).filter(([name, v]) => v.trim() !== "" && (name === "*" || known.has(name)));
  result.egress_bytes_per_step = Object.fromEntries(caps.map(([name, v]) => { const n = number(v); return [name, typeof n === "number" ? n * 1e9 : n]; }));
  return result;
}

// An error at its field: the message begins with the field's path, or with that inside the cluster, batch or constraints.
export function writeWrong(place: HTMLElement, message: string): void {
  const path = message.replace(/^problem\./, "").split(/[:：]/)[0].trim().replace(/^cluster\./, "");
  const at = ["", "constraints.", "batch."].map((prefix) => nearest(prefix + path)).find((f) => f) ?? null;
  place.replaceChildren(h("p", { class: "error", id: "problem", role: "alert" }, message));
  if (!at) return;
  for (let e: Element | null = at; e; e = e.parentElement) if (e instanceof HTMLDetailsElement) e.open = true;
  at.setAttribute("aria-invalid", "true");
  at.setAttribute("aria-describedby", "problem");
  (at as HTMLElement).focus();
  at.after(h("span", { class: "error field-error" }, message.slice(message.search(/[:：]/) + 1).trim()));
  at.addEventListener("input", () => { at.removeAttribute("aria-invalid"); at.parentElement?.querySelector(".field-error")?.remove(); }, { once: true });
}
// The field of a path, or of the longest beginning of it that has one.
function nearest(path: string): Element | null {
  for (let p = path; p; ) {
    const found = document.querySelector(`[data-path="${CSS.escape(p)}"]`);
    if (found) return found;
    const shorter = p.replace(/(\.[^.[]*|\[\d+\])$/, "");
    p = shorter === p ? "" : shorter;
  }
  return null;
}
