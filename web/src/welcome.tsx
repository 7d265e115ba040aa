// Before there is a plan: what is asked, on the map, and the ways to begin.

import type { JSX } from "preact";
import type { Data } from "./api";
import { devicesIn, draft } from "./draft";
import { WorldMap, type Place } from "./map";
import { open, progress, search } from "./state";
import { t } from "./strings";

export const draftPlaces = (cluster: Data): Place[] =>
  cluster.regions.map((r: Data) => ({
    name: r.name, latitude: r.latitude ?? undefined, longitude: r.longitude ?? undefined,
    devices: devicesIn(r),
  }));

export function Welcome(): JSX.Element {
  const places = draftPlaces(draft.value.cluster);
  return (
    <div class="welcome">
      {places.length > 0 && <WorldMap places={places} height={360} label={t("mapTitle")} onSelect={() => open("cluster")} />}
      <ol class="steps">
        <li><b>{t("step1")}</b> {t("step1More")} <button type="button" class="link" onClick={() => open("cluster")}>{t("editCluster")}</button></li>
        <li><b>{t("step2")}</b> {t("step2More")}</li>
        <li><b>{t("step3")}</b> {t("step3More")} <button type="button" class="link" disabled={!!progress.value || places.length === 0} onClick={() => void search()}>{t("calculate")}</button></li>
      </ol>
    </div>
  );
}
