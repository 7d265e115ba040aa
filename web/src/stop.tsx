// The button that stops a search, and says that it does until the search has ended.
import type { JSX } from "preact";
import { stopJob, stopping } from "./state";
import { t } from "./strings";

export function StopJob({ id, job }: { id?: string; job: string }): JSX.Element {
  const asked = stopping.value === job;
  return <button type="button" id={id} aria-disabled={asked} onClick={() => { if (!asked) void stopJob(job); }}>{t(asked ? "stopping" : "cancel")}</button>;
}
