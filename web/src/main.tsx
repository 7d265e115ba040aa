// The page: one screen with a rail, the plan, and a drawer.

import "./style.css";
import { render, type JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { isAway, onToken, part } from "./api";
import { toggleTheme } from "./colors";
import { asking, keys, Palette } from "./commands";
import { canRedo, canUndo, redo, undo } from "./draft";
import { Drawer } from "./drawer";
import { focusSoon, keepFocus } from "./focus";
import { called } from "./names";
import { Overview } from "./overview";
import { Rail } from "./rail";
import { arriving, attempt, begin, catalogue, copyLink, jobs, loading, notice, open, planId, progress, row, shown, tab, trouble, view, VIEWS, type View } from "./state";
import { language, setLanguage, t, type Key } from "./strings";
import { Banner, Broken, Figures, Opening, Sentence, Spoken } from "./summary";
import { Empty, Key as Shortcut, Skeleton, useAnswer, walks } from "./ui";

// Panes that are not looked at first come when they are, and stay.
type Late = Exclude<View, "overview">;
type Drawn = () => JSX.Element;
const PANES: Record<Late, () => Promise<Drawn>> = {
  cluster: () => import("./editor").then((m) => m.Editor),
  strategy: () => import("./strategy").then((m) => m.Strategy),
  communication: () => import("./communication").then((m) => m.Communication),
  compare: () => import("./compare").then((m) => m.Compare),
  front: () => import("./front").then((m) => m.Front),
  deploy: () => import("./deploy").then((m) => m.Deploy),
  runs: () => import("./runs").then((m) => m.RunsPane),
};
const here = new Map<Late, Drawn>();
function LatePane({ name }: { name: Late }): JSX.Element {
  const answer = useAnswer(async (gone) => void here.set(name, await part(PANES[name], gone)), name);
  const Chosen = here.get(name);
  if (Chosen) return <Chosen />;
  return answer.error ? <p class="error" role="alert">{answer.error}</p> : <Skeleton lines={8} />;
}
const WITHOUT_PLAN: View[] = ["overview", "cluster", "front", "runs"];

function App(): JSX.Element {
  useEffect(() => { addEventListener("keydown", keys); return () => removeEventListener("keydown", keys); }, []);
  const wrong = trouble.value || (isAway.value ? t("unreachable") : "");
  return (
    <div class={tab.value && shown.value && view.value !== "cluster" ? "app with-drawer" : "app"} key={language.value}>
      <a class="skip" href="#main" onClick={(e) => { e.preventDefault(); document.getElementById("main")?.focus(); }}>{t("skip")}</a>
      <Top />
      <Rail />
      <main id="main" tabIndex={-1}>
        {view.value === "cluster" ? <h1 class="hidden">{t("editCluster")}</h1> : <div class="head"><Opening /><Sentence /><Banner /><Broken /><Figures /></div>}
        <Views />
        {wrong && <Trouble key={wrong} text={wrong} />}
        <div id="view" role="tabpanel" tabIndex={-1} aria-labelledby={`tab-${view.value}`}><Pane key={`${view.value} ${planId.value}`} /></div>
      </main>
      <Drawer />
      <Palette />
      <Notice />
      <Spoken />
    </div>
  );
}
// What is wrong, where it is seen: whoever has scrolled down, or has the open rail above it, is led to it.
function Trouble({ text }: { text: string }): JSX.Element {
  const place = useRef<HTMLParagraphElement>(null);
  useEffect(() => place.current!.scrollIntoView({ block: "nearest" }), []);
  return <p class="trouble" role="alert" id="trouble" ref={place}><span>{text}</span>{trouble.value && <button type="button" class="small" aria-label={t("close")} onClick={() => (trouble.value = "")}>×</button>}</p>;
}
function Pane(): JSX.Element {
  if (!catalogue.value || (view.value === "cluster" && arriving.value)) return <Skeleton lines={8} />;
  if (view.value === "overview") return <Overview />;
  // What was open before is not shown, or asked about, as the plan that is being opened.
  if ((!shown.value || loading.value) && !WITHOUT_PLAN.includes(view.value)) return planId.value ? <Skeleton lines={8} /> : <Empty>{t("needPlan")}</Empty>;
  return <LatePane name={view.value} />;
}

function Views(): JSX.Element {
  // On a narrow screen the open one may lie beyond the edge of the list.
  useEffect(() => {
    const chosen = document.getElementById(`tab-${view.value}`), list = chosen?.parentElement;
    if (chosen && list) list.scrollLeft = chosen.offsetLeft - list.offsetLeft - (list.clientWidth - chosen.offsetWidth) / 2;
  }, [view.value, shown.value !== null, tab.value]);
  return (
    <nav class="views" aria-label={t("views")}><div role="tablist" aria-label={t("views")} onKeyDown={walks(VIEWS.indexOf(view.value), VIEWS.length, (to) => open(VIEWS[to]))}>{VIEWS.map((name) => (
      <button type="button" role="tab" key={name} id={`tab-${name}`} aria-controls="view" aria-selected={name === view.value} tabIndex={name === view.value ? 0 : -1} onClick={() => open(name)}>{t(`view_${name}` as Key)}</button>))}</div>
      {shown.value && view.value !== "cluster" && !tab.value && <button type="button" class="small" id="open-drawer" onClick={() => { tab.value = "limits"; focusSoon("drawer-limits"); }}>{t("drawer")}</button>}</nav>
  );
}

function Top(): JSX.Element {
  return (
    <header class="top">
      <button type="button" class="brand" onClick={() => open("overview")}><svg width="20" height="20" viewBox="0 0 24 24" aria-hidden="true"><path d="M12 2 21.5 9 18 20H6L2.5 9ZM12 2 6 20M12 2l6 18M2.5 9h19" fill="none" stroke="currentColor" stroke-width="1.6" stroke-linejoin="round" /></svg>polygon</button>
      <span class="what" id="what">{row.value ? called(row.value, jobs.value) : progress.value?.name ?? ""}</span><span class="grow" />
      <button type="button" id="undo" aria-label={t("undo")} title={t("undo")} aria-disabled={!canUndo.value} onClick={undo}>↶</button>
      <button type="button" id="redo" aria-label={t("redo")} title={t("redo")} aria-disabled={!canRedo.value} onClick={redo}>↷</button>
      <button type="button" id="palette" onClick={() => (asking.value = true)}>{t("commands")}<Shortcut keys="⌘K" /></button>
      {planId.value && <button type="button" id="share-top" onClick={() => void attempt(copyLink)}>{t("share_")}</button>}
      <button type="button" id="theme" aria-label={t("theme")} title={t("theme")} onClick={toggleTheme}>◐</button>
      <button type="button" id="language" lang={language.value === "en" ? "zh-CN" : "en"} aria-label={t("language")} title={t("language")} onClick={() => setLanguage(language.value === "en" ? "zh" : "en")}>{language.value === "en" ? <Zhongwen /> : t("language")}</button>
    </header>
  );
}
// 中文, drawn: the letters would load a font of 20 MB before the first view of who reads English.
function Zhongwen(): JSX.Element {
  return <svg class="word" width="26" height="13" viewBox="0 0 26 13" aria-hidden="true"><path d="M1.5 3.5h9v4.5h-9zM6 .8v11.4M19.5.8v2M14 3h11M22.5 3c-1 4-4 7-8.300 9M16 3c1 4 4.500 7.500 9 9" fill="none" stroke="currentColor" stroke-width="1.1" /></svg>;
}
const NOTICE_MS = 2500, READ_MS = 60; // at least, and a letter
function Notice(): JSX.Element {
  const [now, set] = useState({ said: "" });
  useEffect(() => {
    if (!notice.value) return;
    set({ said: notice.value });
    notice.value = "";
  }, [notice.value]);
  // As long as it takes to read.
  useEffect(() => {
    if (!now.said) return;
    const timer = setTimeout(() => set({ said: "" }), Math.max(NOTICE_MS, READ_MS * now.said.length));
    return () => clearTimeout(timer);
  }, [now]);
  return <div class={now.said ? "notice on" : "notice"} aria-live="polite">{now.said}</div>;
}

onToken((isWrong) => new Promise((resolve) => {
  const dialog = document.createElement("dialog");
  dialog.setAttribute("aria-label", t("token"));
  document.body.append(dialog);
  let given = "";
  dialog.addEventListener("close", () => { render(null, dialog); dialog.remove(); resolve(given); });
  render(<form method="dialog"><label class="field"><span>{t("token")}</span><input type="password" autocomplete="off" onInput={(e) => (given = e.currentTarget.value)} /></label>{isWrong && <p class="error" role="alert">{t("tokenWrong")}</p>}<button class="main">{t("ok")}</button></form>, dialog);
  dialog.showModal();
}));

setLanguage(language.value);
void attempt(begin); // what is asked of the server is under way while the page is drawn
const app = document.getElementById("app")!;
render(<App />, app);
keepFocus(app);
