// The right drawer: what limits the plan, what could be tried, why not otherwise, what is taken for granted.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { call, get, patiently, post, type Data } from "./api";
import { energy, gbps, ms, percent, seconds, signed, usd } from "./format";
import { changed, draft, isGuessedLink } from "./draft";
import { amount, ASSUMED_FACTOR, assumedLink, hiddenLimit, resource, WithoutTried, WORTH } from "./summary";
import { anew, assumed, attempt, follow, go, isUnderWay, limits, once, outcome, planId, running, selected, shown, tab, timeLeft, view, workNote, type Tab } from "./state";
import { focusSoon } from "./focus";
import { t, type Key } from "./strings";
import { Empty, Skeleton, walks } from "./ui";
import { WhatIf } from "./whatif";

const TABS: [Tab, Key][] = [["limits", "tabLimits"], ["whatif", "whatif"], ["whynot", "whyNot"], ["assumed", "tabAssumed"]];

export function Drawer(): JSX.Element | null {
  if (!tab.value || !shown.value || view.value === "cluster") return null;
  const now = tab.value;
  const close = (): void => { tab.value = ""; focusSoon("open-drawer"); };
  const walk = walks(TABS.findIndex(([name]) => name === now), TABS.length, (to) => { tab.value = TABS[to][0]; });
  return (
    <aside class="drawer" aria-label={t("drawer")} onKeyDown={(e) => { if (e.key === "Escape") close(); }}>
      <h2 class="hidden">{t("drawer")}</h2>
      <div class="drawer-head"><div role="tablist" aria-label={t("drawer")} onKeyDown={walk}>{TABS.map(([name, key]) => (
        <button type="button" role="tab" key={name} id={`drawer-${name}`} aria-selected={now === name} aria-controls="drawer-panel" tabIndex={now === name ? 0 : -1} onClick={() => (tab.value = name)}>{t(key)}</button>))}</div>
        <button type="button" class="small" aria-label={`${t("close")}: ${t("drawer")}`} onClick={close}>×</button></div>
      <div class="drawer-body" id="drawer-panel" role="tabpanel" tabIndex={0} aria-labelledby={`drawer-${now}`}>
        {(now === "limits" || now === "whynot") && <WithoutTried words="drawerWithout" />}
        {now === "limits" ? <Limits /> : now === "whatif" ? <WhatIf key={planId.value} /> : now === "whynot" ? <WhyNot key={planId.value} /> : <Assumed />}
      </div>
    </aside>
  );
}

function Limits(): JSX.Element {
  const data = limits.value;
  if (!data || (!data.whole && !data.limits.length)) return <Skeleton lines={6} />;
  const joint: Data[] = data.together ?? [];
  if (!data.limits.length && !joint.length) return <Empty>{t("limitedByNothing")}</Empty>;
  const most = data.limits[0]?.saves ?? 1;
  const hidden = hiddenLimit();
  const known = data.limits.slice(0, SHOWN).some((l: Data) => isOf(hidden, l));
  return (
    <>
      {joint.length > 0 && <div id="together"><div class="limit-head"><b>{t("togetherTitle")}</b><span>−{percent(data.together_saves)}</span></div><ul class="plain">{joint.map((l, i) => <li key={i}>{resource(l)}{l.default && <i class="mark">{t("default")}</i>}</li>)}</ul></div>}
      <p class="soft">{t("limitsHint")}</p>
      <ol class="limits" id="limits">{data.limits.slice(0, SHOWN).map((l: Data, i: number) => (
        <li key={i} data-kind={l.kind} data-region={l.region}>
          <div class="limit-head"><b>{resource(l)}</b>{l.default && <i class="mark">{t("default")}</i>}<span class="soft">{l.quality || l.kind === "memory" ? amount(l, l.now) : ""}</span></div>
          <div class="meter"><i style={{ width: `${(100 * l.saves) / most}%` }} /></div>
          <Savings l={l} index={i} />
          {IN_EDITOR.includes(l.kind) && <EditIt region={l.region} what={resource(l)} />}
        </li>))}
        {hidden && !known && <li><div class="limit-head"><b>{assumedLink(hidden)}</b><i class="mark">{t("default")}</i><span class="soft">{gbps(hidden.bandwidth_gbps)}</span></div>
          <dl class="savings"><Saving value={gbps(hidden.bandwidth_gbps * ASSUMED_FACTOR)} plan="withAnotherPlan" part={hidden.anew} /></dl><EditIt region={hidden.region} what={assumedLink(hidden)} /></li>}</ol>
      {!data.whole && <p class="soft waiting">{t("lookingFurther")}</p>}
    </>
  );
}
const SHOWN = 8, ANEW = 3;
const IN_EDITOR = ["intra_region", "inter_node", "intra_node", "pair"];
const EditIt = ({ region, what }: { region: string; what: string }): JSX.Element => (
  <button type="button" class="link" aria-label={`${t("edit")}: ${what}`} onClick={() => go(() => { selected.value = region; view.value = "cluster"; })}>{t("edit")}</button>
);
/** Whether a link that nobody gave is the one that a limit is of. */
const isOf = (a: Data, l: Data): boolean => a !== undefined && l.quality === "rate" && (a.other ? l.kind === "pair" && [l.other, l.region].includes(a.other) : a.name.endsWith(`.${l.kind}`)) && [l.region, l.other].includes(a.region) && (a.other || l.kind === "intra_region" || a.device === l.device);

/** What a value saves, and with which plan: with this one exactly, with another at least. */
function Saving({ value, part, plan = "withThisPlan" }: { value: string; part: number; plan?: Key }): JSX.Element {
  const isFound = plan === "withAnotherPlan", saved = signed(-part, percent);
  return <div><dt>{value} <span class="soft">{t(plan)}</span></dt><dd class={part > WORTH ? "anew" : "soft"}>{part > 0 ? (isFound ? t("orMore", { part: saved }) : saved) : t(isFound ? "foundNothing" : "nothing")}</dd></div>;
}
// More and more of one resource: a little with this plan, what is worth having, and then with another plan, which comes
// after the rest. A plan found for less of it is one for more of it, too.
function Savings({ l, index }: { l: Data; index: number }): JSX.Element {
  const again = anew.value[index];
  const link = assumed.value?.find((a) => isOf(a, l));
  const rate = link && link.bandwidth_gbps * ASSUMED_FACTOR;
  const least = link && again && rate <= again.value ? Math.max(again.would_save, link.anew) : again?.would_save;
  const kept = l.suggested !== null ? { value: amount(l, l.suggested), part: l.would_save } : again && again.same_plan > l.saves ? { value: amount(again, again.value), part: again.same_plan } : null;
  // Where another plan saves no more, both are one line.
  const isSame = kept && again && kept.value === amount(again, again.value) && percent(kept.part) === percent(least);
  const ofLink = link && link.anew > Math.max(WORTH, link.faster) && rate !== again?.value ? <Saving value={gbps(rate)} part={link.anew} plan="withAnotherPlan" /> : null;
  const isLater = ofLink && again && rate > again.value;
  return (
    <dl class="savings">
      <Saving value={t("tenBetter")} part={l.saves} />
      {kept && <Saving {...kept} plan={isSame ? "withEitherPlan" : "withThisPlan"} />}
      {!isLater && ofLink}
      {again ? !isSame && <Saving value={amount(again, again.value)} part={least} plan="withAnotherPlan" /> : index < ANEW && limits.value.whole && <div><dt class="soft waiting">{t("planningAnew")}</dt><dd /></div>}
      {isLater && ofLink}
    </dl>
  );
}

function Assumed(): JSX.Element {
  const rows = assumed.value;
  const loss: string[] = shown.value.assumptions;
  return (
    <>
      <h3>{t("assumedLinks")}</h3>
      <WithoutTried words="drawerWithout" />
      {rows === null ? <Skeleton lines={4} /> : rows.length === 0 ? <Empty>{t("nothingAssumedLinks")}</Empty> : <ol class="limits" id="assumed-links">{rows.map((a) => <AssumedLink key={a.name} a={a} />)}</ol>}
      <AssumedBetween />
      <h3>{t("assumed")}</h3>
      {loss.length === 0 ? <Empty>{t("nothingAssumed")}</Empty> : <ul class="plain" id="assumed">{loss.map((a, i) => <li key={i}>{a}</li>)}</ul>}
    </>
  );
}
// Links between regions that the page filled in while the cluster was built: those first that the plan uses.
function AssumedBetween(): JSX.Element | null {
  const c = draft.value.cluster;
  if (changed.value) return null;
  const carries = new Map<string, number>();
  for (const l of shown.value.links) {
    const ends = [l.source, l.target].sort().join("\n"); // both ways together
    carries.set(ends, (carries.get(ends) ?? 0) + l.activation_bytes + l.gradient_bytes);
  }
  const pairs = c.regions.flatMap((a: Data, i: number) => c.regions.slice(i + 1).map((b: Data, k: number) => ({ a: a.name, b: b.name, i, j: i + 1 + k })))
    .filter((p: Data) => isGuessedLink(p.a, p.b, "bandwidth_gbps") && !assumed.value?.some((a) => a.region === p.a && a.other === p.b))
    .map((p: Data) => ({ ...p, bytes: carries.get([p.a, p.b].sort().join("\n")) ?? 0 })).sort((p: Data, q: Data) => q.bytes - p.bytes);
  if (!pairs.length) return null;
  return (
    <><h3>{t("assumedBetween")}</h3><ol class="limits" id="assumed-between">{pairs.slice(0, 12).map((p: Data) => (
      <li key={`${p.a} ${p.b}`}><div class="limit-head"><b>{p.a} – {p.b}</b><i class="mark">{t("default")}</i></div>
        <small class="soft">{t("assumedBetweenNote", { rate: gbps(c.bandwidth_gbps[p.i][p.j]), latency: ms(c.latency_ms[p.i][p.j]) })}</small>
        <GiveIt region={p.a} what={`${p.a} – ${p.b}`} /></li>))}</ol>
      {pairs.length > 12 && <p class="soft">{t("andMore", { n: pairs.length - 12 })}</p>}</>
  );
}
const GiveIt = ({ region, what }: { region: string; what: string }): JSX.Element => (
  <button type="button" class="link" aria-label={`${t("giveIt")}: ${what}`} onClick={() => go(() => { selected.value = region; view.value = "cluster"; })}>{t("giveIt")}</button>
);
function AssumedLink({ a }: { a: Data }): JSX.Element {
  return (
    <li><div class="limit-head"><b>{assumedLink(a)}</b><i class="mark">{t("default")}</i></div>
      <small class="soft">{gbps(a.bandwidth_gbps)}, {ms(a.latency_ms)}</small>
      <small>{t("ifSlower", { slower: signed(a.slower, percent), faster: signed(-a.faster, percent) })}</small>
      {a.anew > a.faster && <small class="anew">{t("assumedAnew", { value: gbps(a.bandwidth_gbps * ASSUMED_FACTOR), part: percent(a.anew) })}</small>}
      <GiveIt region={a.region} what={assumedLink(a)} /></li>
  );
}

const LIMITS_S = [30, 60, 300, 600];
function WhyNot(): JSX.Element {
  const [state, set] = useState<Data>(null);
  const [limit, setLimit] = useState(60);
  const [error, setError] = useState("");
  const id = planId.value;
  useEffect(() => {
    const stop = new AbortController();
    const load = async (): Promise<void> => {
      const found = await get(`/plans/${id}/explanation`, stop.signal);
      set(found);
      if (!running(found)) return;
      const left = timeLeft();
      // Its end is shown with the answers: without them there is the form again, which would take the focus for a moment.
      await follow(`/jobs/${found.id}`, stop.signal, (now) => { if (running(now)) set((old: Data) => ({ ...old, ...now, left_s: left(now.progress) })); });
      const ended = await get(`/plans/${id}/explanation`, stop.signal), a = ended.answers;
      const reads = document.getElementById("why-not")?.contains(document.activeElement);
      set((old: Data) => ({ ...ended, begun: old?.begun }));
      // Who waited there reads on from its first heading, which takes the focus itself: the arrow after goes past what has it.
      if (a && reads) setTimeout(() => document.querySelector<HTMLElement>("#why-not h3")?.focus());
      if (a) outcome.value = t("ideasFound", { n: a.different_plans.length + a.alternatives.length + felt(a).length });
    };
    patiently(load).catch((e: Error) => { if (!stop.signal.aborted) setError(e.message); });
    return () => stop.abort();
  }, [id, state?.begun]);
  const start = (): Promise<void> => once(`explain ${id}`, () => attempt(async () => {
    const begun = await post(`/plans/${id}/explanation`, { time_limit_s: limit });
    outcome.value = t("working");
    set({ ...begun, begun: Date.now() });
  }));
  if (error) return <p class="error" role="alert">{error}</p>;
  if (!state) return <Skeleton />;
  const a = state.answers;
  if (running(state))
    return <div id="why-not"><progress max={1} value={state.progress} aria-label={t("computing")} /><p class="soft">{workNote(state)}</p><button type="button" onClick={() => void attempt(async () => void (await call("DELETE", `/jobs/${state.id}`)))}>{t("cancel")}</button></div>;
  const begin = (words: string): JSX.Element => (
    <div class="row"><label class="field"><span>{t("atMostTime")}</span><select value={limit} onChange={(e) => setLimit(Number(e.currentTarget.value))}>{LIMITS_S.map((s) => <option key={s} value={s}>{s < 120 ? t("forSeconds", { n: s }) : t("forMinutes", { n: s / 60 })}</option>)}</select></label>
      <button type="button" class="main" id="explain" aria-disabled={isUnderWay(`explain ${id}`)} onClick={() => void start()}>{words}</button></div>
  );
  if (!a) return <div id="why-not"><p class="soft">{t("whyNotHint")}</p>{begin(t("whyNotStart"))}{state.error && <p class="error">{state.error}</p>}</div>;
  const missing = [...a.left_out, ...(a.changes_left_out ? [t("changesLeftOut", { n: a.changes_left_out })] : [])];
  return <div id="why-not"><Ideas a={a} />{missing.length > 0 && <><p class="soft" id="left-out-ideas">{t(state.state === "cancelled" ? "stoppedBefore" : "leftOutIdeas", { what: missing.join(t("semicolon")) })}</p>{begin(t("whyNotMore"))}</>}</div>;
}
const felt = (a: Data): Data[] => a.sensitivities.filter((s: Data) => Math.min(s.same_plan, s.replanned) < -1e-4).sort((x: Data, y: Data) => x.replanned - y.replanned);
function Ideas({ a }: { a: Data }): JSX.Element {
  const of: "time" | "money" | "energy" = a.objective ?? "time"; // what the plan was made for; answers of before are of time
  const change = (part: number | null): string => (part === null ? "—" : signed(part, percent));
  const takes = (r: Data): string => [...(of === "energy" && r.energy_j ? [energy(r.energy_j)] : []), seconds(r.step_s), ...(r.usd ? [t("perStep", { usd: usd(r.usd) })] : [])].join(" · ");
  const part = (title: string, rows: Data[]): JSX.Element | null => rows.length === 0 ? null : (
    <><h3 tabIndex={-1}>{title}</h3><ul class="ideas">{rows.map((r, i) => <li key={i}><div class="limit-head"><b>{r.idea}</b><span>{r.possible ? change(r.worse_by === undefined ? r.slower_by : r.worse_by) : t("impossible")}</span></div><small class="soft">{r.possible ? `${takes(r)}. ` : ""}{r.reason}</small></li>)}</ul></>
  );
  const better = (s: Data): string => (s.replanned < 0 ? t("orMore", { part: change(s.replanned) }) : t("foundNothing"));
  return (
    <>
      <p class="soft" id="ideas-of">{t(`shortSearches_${of}`)}</p>
      {a.unsaid?.length > 0 && <p class="soft" id="ideas-unsaid">{t(of === "energy" ? "noPower" : "noPrice", { devices: a.unsaid.join(", ") })}</p>}
      {part(t("differentPlans"), a.different_plans)}
      {part(t("naiveIdeas"), a.alternatives.filter((r: Data) => r.naive))}
      {part(t("rejectedIdeas"), a.alternatives.filter((r: Data) => !r.naive))}
      {felt(a).length > 0 && <><h3 tabIndex={-1}>{t("betterCluster")}</h3><p class="soft">{t("searchedHint", { value: of === "energy" ? energy(a.searched) : of === "money" ? usd(a.searched) : seconds(a.searched_step_s) })}</p>
        <ul class="ideas">{felt(a).map((s: Data, i: number) => <li key={i}><div class="limit-head"><b>{s.text}</b><span>{better(s)}</span></div><small class="soft">{t("samePlan")} {change(s.same_plan)}{a.usd ? ` · ${t("worth", { usd: signed(s.usd_per_hour, usd) })}` : ""}</small></li>)}</ul></>}
    </>
  );
}
