// What the page knows: the plan that is open, the changes tried on it, and what the server said of both.

import { call, get, post, type Data } from "./api";

export interface Changes {
  [name: string]: unknown;
}
export const state: {
  view: string; planId: string; planned: Data; shown: Data; changes: Changes; catalogue: Data; asked: number; target: string; showSends: boolean; measured: Data; linkIndex: string; deviceType: string; missing: string;
} = { view: "configure", planId: "", planned: null, shown: null, changes: {}, catalogue: null, asked: 0, target: "deepspeed", showSends: false, measured: null, linkIndex: "", deviceType: "", missing: "" };

export async function openPlan(id: string): Promise<void> {
  state.planned = state.shown = await post(`/api/plans/${id}/view`, {});
  state.planId = id;
  state.changes = {};
  state.linkIndex = state.deviceType = "";
  state.measured = null;
}
// Price the plan with the changes; a question that another has overtaken is taken back.
let before = new AbortController();
export async function reprice(): Promise<boolean> {
  before.abort();
  const { signal } = (before = new AbortController());
  state.asked++;
  try {
    const shown = await call("POST", `/api/plans/${state.planId}/view`, state.changes, signal);
    if (!signal.aborted) state.shown = shown;
  } catch (error) {
    if (!signal.aborted) throw error;
  }
  return !signal.aborted;
}
export async function loadCatalogue(): Promise<void> {
  state.catalogue ??= await get("/api/catalogue");
}
