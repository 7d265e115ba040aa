// The page: header, tabs, and the view that is open. The address says which plan and view, so that it can be shared.

import "./style.css";
import { onToken } from "./api";
import { charts } from "./charts";
import { communication } from "./communication";
import { configure } from "./configure";
import { deploy } from "./deploy";
import { h } from "./dom";
import { trainingMap } from "./map";
import { openPlan, state } from "./state";
import { strategy } from "./strategy";
import { currentLanguage, setLanguage, t, type Key } from "./strings";
import { timeline } from "./timeline";
import { registerWorld } from "./world";

const VIEWS: Key[] = ["configure", "map", "strategy", "timeline", "communication", "deploy"];
registerWorld();
setLanguage(currentLanguage());
const theme = localStorage.getItem("polygon-theme");
if (theme) document.documentElement.dataset.theme = theme;

onToken(() => new Promise((resolve) => {
  const input = h("input", { type: "password", autocomplete: "off" });
  const dialog = h("dialog", { "aria-label": t("token") }, h("form", { method: "dialog", onsubmit: () => resolve(input.value) }, h("label", {}, t("token"), input), h("p", {}, h("button", { class: "main" }, t("ok")))));
  dialog.addEventListener("close", () => { resolve(input.value); dialog.remove(); });
  document.body.append(dialog);
  dialog.showModal();
}));

function frame(): void {
  document.title = t("title");
  const app = document.getElementById("app")!;
  app.replaceChildren(
    h("a", { class: "skip", href: "#view", onclick: (e: Event) => { e.preventDefault(); document.getElementById("view")?.focus(); } }, t("skip")),
    h("header", {}, h("h1", { class: "brand", style: "margin:0" }, mark(), "polygon"), h("span", { class: "what", id: "what" }),
      h("button", { type: "button", id: "theme", onclick: toggleTheme }, t("theme")), h("button", { type: "button", id: "language", lang: currentLanguage() === "en" ? "zh-CN" : "en", onclick: () => { setLanguage(currentLanguage() === "en" ? "zh" : "en"); frame(); void open(state.view); } }, t("language"))),
    h("nav", { "aria-label": t("views") }, h("div", { role: "tablist", "aria-label": t("views"), onkeydown: walk }, VIEWS.map((name) => h("button", { role: "tab", type: "button", id: `tab-${name}`, "aria-controls": "view", "aria-selected": String(name === state.view), tabindex: name === state.view ? "0" : "-1", onclick: () => void open(name) }, t(name))))),
    h("main", {}, h("div", { id: "view", role: "tabpanel", tabindex: "-1", "aria-labelledby": `tab-${state.view}` })));
}
function mark(): SVGElement {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [k, v] of Object.entries({ width: "24", height: "24", viewBox: "0 0 24 24", "aria-hidden": "true" })) svg.setAttribute(k, v);
  const shape = document.createElementNS("http://www.w3.org/2000/svg", "path");
  for (const [k, v] of Object.entries({ d: "M12 2 21.5 9 18 20H6L2.5 9ZM12 2 6 20M12 2l6 18M2.5 9h19", fill: "none", stroke: "currentColor", "stroke-width": "1.6", "stroke-linejoin": "round" })) shape.setAttribute(k, v);
  svg.append(shape);
  return svg;
}
function toggleTheme(): void {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("polygon-theme", document.documentElement.dataset.theme);
  void open(state.view);
}
function walk(event: Event): void {
  const key = (event as KeyboardEvent).key;
  const at = VIEWS.indexOf(state.view as Key);
  const to = key === "ArrowRight" ? at + 1 : key === "ArrowLeft" ? at - 1 : key === "Home" ? 0 : key === "End" ? VIEWS.length - 1 : at;
  if (to !== at) { event.preventDefault(); void open(VIEWS[(to + VIEWS.length) % VIEWS.length]).then(() => document.getElementById(`tab-${state.view}`)?.focus()); }
}

async function open(name: string): Promise<void> {
  state.view = VIEWS.includes(name as Key) ? name : "configure";
  const hash = new URLSearchParams({ ...(state.planId ? { plan: state.planId } : {}), view: state.view });
  history.replaceState(null, "", `#${hash}`);
  for (const view of VIEWS) {
    const tab = document.getElementById(`tab-${view}`)!;
    tab.setAttribute("aria-selected", String(view === state.view));
    tab.tabIndex = view === state.view ? 0 : -1;
    if (view === state.view) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  const root = document.getElementById("view")!;
  root.setAttribute("aria-labelledby", `tab-${state.view}`);
  for (const [key, chart] of charts) { chart.dispose(); charts.delete(key); }
  document.getElementById("what")!.textContent = state.shown ? `${state.shown.model} · ${state.shown.devices.used}/${state.shown.devices.all} ${t("devices")}` : "";
  if (state.view === "configure") await configure(root, () => void open("map"));
  else if (!state.shown) root.replaceChildren(h("section", { class: "panel" }, h("p", {}, t("needPlan")), h("button", { class: "main", type: "button", onclick: () => void open("configure") }, t("configure"))));
  else ({ map: trainingMap, strategy, timeline, communication, deploy } as Record<string, (r: HTMLElement) => void>)[state.view](root);
}

async function begin(): Promise<void> {
  const asked = new URLSearchParams(location.hash.slice(1));
  state.view = asked.get("view") ?? "configure";
  frame();
  const plan = asked.get("plan");
  if (plan && plan !== state.planId) await openPlan(plan).catch((e: Error) => { state.view = "configure"; state.missing = `${plan}: ${e.message}`; });
  await open(state.view);
}
window.addEventListener("hashchange", () => void begin());
void begin();
