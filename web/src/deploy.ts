// Deploy: files for other systems, what they cannot express, and a folder with all of it.

import { call, copy, download, get, post, type Data } from "./api";
import { h, into, table } from "./dom";
import { seconds, signed } from "./format";
import { t } from "./strings";
import { state } from "./state";

const TARGETS: Record<string, string> = { deepspeed: "DeepSpeed", megatron: "Megatron-LM", torchtitan: "torchtitan", torchrun: "torchrun / dist_runner", skypilot: "SkyPilot", tc: "tc" };
let file = "";

export function deploy(root: HTMLElement): void {
  root.replaceChildren(h("div", { class: "grid" },
    h("section", { class: "panel" }, h("div", { class: "fields" }, h("label", {}, t("target"), h("select", { id: "target", onchange: (e: Event) => { state.target = (e.target as HTMLSelectElement).value; file = ""; deploy(root); } }, Object.entries(TARGETS).map(([x, name]) => h("option", { value: x, selected: x === state.target }, x === "tc" ? t("trafficControl") : name))))),
      h("div", { id: "losses", "aria-live": "polite" }, t("computing"))),
    h("section", { class: "panel" }, h("h2", {}, t("files")), h("div", { id: "files" })),
    h("section", { class: "panel half" }, h("h2", {}, t("deployTitle")),
      h("label", {}, t("deployName"), h("input", { id: "deploy-name", value: `${slug(state.shown.model)}-${state.target}` })),
      h("label", { style: "margin:10px 0" }, t("hosts"), h("textarea", { id: "deploy-hosts", rows: 4 })),
      h("button", { class: "main", id: "deploy", type: "button", onclick: () => void write() }, t("deployButton")), h("div", { id: "deploy-result", role: "status" })),
    h("section", { class: "panel half" }, h("h2", {}, t("deployments")), h("div", { id: "deployments" }))));
  const target = state.target;
  into("losses", get(`/api/plans/${state.planId}/exports/${target}`), (data) => { if (target === state.target && state.view === "deploy") showExport(data); });
  into("deployments", list(), () => undefined);
}
const slug = (text: string): string => text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 24) || "plan";

function showExport(data: Data): void {
  document.getElementById("losses")!.replaceChildren(
    h("p", {}, h("b", {}, seconds(data.plan_step_s)), ` ${t("planned")}, `, h("b", {}, seconds(data.step_s)), ` ${t("with")} ${TARGETS[data.target]}`),
    data.losses.length ? table(t("cannot"), [t("cannot"), t("step")], data.losses.map((l: Data) => [l.what, l.cost_s === null ? "—" : signed(l.cost_s, seconds)]), [1]) : h("p", { class: "good" }, t("nothingLost")),
    h("p", {}, `${t("start")}: `, h("code", {}, data.start)), h("ul", { class: "plain soft" }, data.notes.map((n: string) => h("li", {}, n))));
  const names = Object.keys(data.files).sort();
  if (!names.includes(file)) file = names.find((n) => n === "ds_config.json" || n === "arguments.txt" || n === "flags.txt") ?? names[0];
  const text = h("pre", { tabindex: "0", id: "file-text", "aria-label": t("files") });
  const note = h("span", { class: "soft", role: "status" });
  const buttons = names.map((n) => h("button", { type: "button", class: "small", "aria-pressed": String(n === file), onclick: () => choose(n) }, n));
  const choose = (name: string): void => { file = name; text.textContent = data.files[name]; note.textContent = ""; buttons.forEach((b, i) => b.setAttribute("aria-pressed", String(names[i] === name))); };
  document.getElementById("files")!.replaceChildren(h("div", { class: "files" }, buttons), text, h("div", { class: "row" },
    h("button", { type: "button", id: "copy", onclick: async () => { await copy(data.files[file]); note.textContent = t("copied"); } }, t("copy")), h("button", { type: "button", onclick: () => download(file, data.files[file]) }, t("download")), note));
  choose(file);
}
async function write(): Promise<void> {
  const place = document.getElementById("deploy-result")!;
  try {
    const hosts = (document.getElementById("deploy-hosts") as HTMLTextAreaElement).value;
    const result = await post(`/api/plans/${state.planId}/deploy`, { name: (document.getElementById("deploy-name") as HTMLInputElement).value, target: state.target, hosts });
    const right = result.checks.every((c: Data) => c.passed);
    place.replaceChildren(h("div", {}, h("p", {}, `${t("start")}: `, h("code", {}, `cd deployments/${result.name} && ${result.start}`)), !hosts.trim() && h("p", { class: "error" }, t("madeUpHosts")), h("p", { class: right ? "good" : "error" }, `deployments/${result.name}/ · ${t("files")}: ${result.files.length} · ${t("checks")}: ${right ? t("passed") : t("wrong")}`), table(t("checks"), [t("checks"), ""], result.checks.slice(0, 40).map((c: Data) => [c.what, c.passed ? t("passed") : `${t("wrong")}: ${c.found}`]))));
    void list();
  } catch (e) { place.replaceChildren(h("p", { class: "error", role: "alert" }, (e as Error).message)); }
}
async function list(): Promise<void> {
  const rows = await call("GET", "/api/deployments");
  document.getElementById("deployments")?.replaceChildren(rows.length === 0 ? h("p", { class: "soft" }, t("noneYet")) : table(t("deployments"), [t("name"), t("files")], rows.map((r: Data) => [`deployments/${r.name}/`, r.files.length]), [1]));
}
