// The cluster editor: the map to place regions, everything that a file can say as fields, and the file itself beside it.

import { batch } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { download, patiently, post, type Data } from "./api";
import { appendRegion, arrived, draft, dropNodes, dropRegion, edit, isGuessed, isMeasured, MATRICES, onceHere, regionId, rename, renameDevice, request, takeMeasured, told } from "./draft";
import { mark, pathOf, unmark } from "./faults";
import { digits, gbps, ms, whole } from "./format";
import { guessAgain, guessLatency, guessLinks } from "./links";
import { kmBetween, placed, WorldMap } from "./map";
import { attempt, catalogue, notice, requested, selected, trouble } from "./state";
import { t, type Key } from "./strings";
import { useKept } from "./kept";
import { Choice, Empty, Field, Menu, number, Section, Upload, walks } from "./ui";
import { draftPlaces } from "./welcome";
import { readCluster } from "./rail";
import { Yaml } from "./yaml";

/** The cluster with every value spelt out, as the server reads the draft; null while it is wrong. */
interface Resolved { full: Data; yaml: string; error: string }
const NONE: Resolved = { full: null, yaml: "", error: "" };

// The last answer of the server, kept over a reload: its next one may take a while where it is searching.
const KEY = "polygon-resolved";
function remembered(cluster: string): Resolved {
  try {
    const kept = JSON.parse(sessionStorage.getItem(KEY) ?? "null");
    return kept?.cluster === cluster ? { ...kept.found, error: "" } : NONE;
  } catch {
    return NONE;
  }
}
function remember(cluster: string, found: Data): void {
  try {
    sessionStorage.setItem(KEY, JSON.stringify({ cluster, found }));
  } catch {
    sessionStorage.removeItem(KEY); // too large for the browser's quota
  }
}

const onCluster = (change: (cluster: Data) => void, of = ""): void => edit((d) => change(d.cluster), of);

export function Editor(): JSX.Element {
  const cluster = draft.value.cluster;
  const text = JSON.stringify(cluster);
  const [resolved, set] = useState<Resolved>(() => remembered(text));
  // Of regions that have one name, as for a moment while another is typed, the one that was chosen stays.
  const [chosen, choose] = useState(0);
  const name = (i: number): string | undefined => cluster.regions[i]?.name;
  const at = name(chosen) === selected.value ? chosen : Math.max(0, cluster.regions.findIndex((r: Data) => r.name === selected.value));
  useEffect(() => choose(at), [at]);
  const pick = (i: number): void => batch(() => { choose(i); selected.value = name(i)!; });
  useEffect(() => {
    const stop = new AbortController(), seen = selected.peek();
    // The draft may be another already, by undo say, before this is drawn anew: nothing is said of what it is no more.
    const isOld = (): boolean => stop.signal.aborted || JSON.stringify(draft.peek().cluster) !== text;
    const timer = setTimeout(() => {
      if (!cluster.regions.length) return set(NONE);
      patiently(() => post("/clusters", { cluster: told() }, stop.signal))
        .then((data) => {
          if (isOld()) return;
          set({ ...data, error: "" });
          remember(text, data);
          unmark("cluster"); // and what was said of it
          if (pathOf(trouble.value).startsWith("cluster")) trouble.value = "";
        })
        .catch((e: Error) => {
          if (isOld()) return;
          const [, r = NaN, other = NaN] = (/^cluster\.(?:regions|\w+_(?:ms|gbps))\[(\d+)\](?:\[(\d+)\])?/.exec(e.message) ?? []).map(Number);
          // Who has gone on to another region meanwhile stays there, and who sees the link at its other end.
          if (cluster.regions[r] && selected.peek() === seen && ![r, other].some((it) => name(it) === seen)) pick(r);
          set((old) => ({ ...old, error: e.message }));
          mark(e.message, "cluster-error", false);
        });
    }, 120);
    return () => { clearTimeout(timer); stop.abort(); };
  }, [text]);
  // Map and region at once, the rest in tasks of their own: between them the browser draws and listens.
  const [rest, draw] = useState(false);
  useEffect(() => { const timer = setTimeout(() => draw(true)); return () => clearTimeout(timer); }, []);
  return (
    <div class="editor">
      <div class="editor-form">
        <Section title={t("cluster")} tools={<Tools />}>
          <WorldMap places={draftPlaces(cluster)} height={230} label={t("editMap")} onSelect={(region) => { selected.value = region; }}
            onMove={(name, latitude, longitude) => edit((d) => {
              const r = d.cluster.regions.findIndex((it: Data) => it.name === name);
              Object.assign(d.cluster.regions[r], { latitude, longitude });
              guessAgain(d, r);
            }, `move ${name}`)} />
          <div class="row adding">
            <Choice acts label={t("place")} path="place" value="" hidden options={[["", t("addPlace")], ...(catalogue.value?.regions ?? []).map((r: Data): [string, string] => [r.name, r.name])]}
              set={(name) => { const r = catalogue.value.regions.find((x: Data) => x.name === name); if (r) addRegion(r.name.toLowerCase(), r.latitude, r.longitude); }} />
            <button type="button" id="add-region" onClick={() => addRegion(`region-${cluster.regions.length + 1}`)}>{t("addRegion")}</button>
            <span class="soft">{t("dragHint")}</span>
          </div>
        </Section>
        {cluster.regions.length === 0 ? <Empty>{t("noRegionsYet")}</Empty> : <>
          <div role="tablist" class="pills" aria-label={t("regions")} onKeyDown={walks(at, cluster.regions.length, pick)}>{cluster.regions.map((r: Data, i: number) => (
            <button type="button" role="tab" key={i} aria-selected={i === at} aria-controls="region" tabIndex={i === at ? 0 : -1} id={`region-tab-${i}`} onClick={() => pick(i)}>{r.name}</button>
          ))}</div>
          {/* With keys: without one, the row that comes would take the panel's element, and the field in it would lose the focus. */}
          {resolved.error && <div key="error" class="row middle"><p class="error" role="alert" id="cluster-error">{ofLink(resolved.error)}</p></div>}
          <div key="region" role="tabpanel" id="region" aria-labelledby={`region-tab-${at}`}>
            <RegionForm key={at} r={at} full={resolved.full?.regions[at]} />
            {rest && cluster.regions.length > 1 && <Links key={`links ${at}`} r={at} full={resolved.full} />}
          </div>
          {rest && <Devices />}
        </>}
      </div>
      <Yaml yaml={resolved.yaml} old={resolved.error !== ""} />
    </div>
  );
}

const LINKS: Record<string, Key> = { latency_ms: "latencyOneWay", bandwidth_gbps: "rate", capacity_gbps: "capacity" };
/** A fault in a link between regions, with their names. */
function ofLink(message: string): string {
  const names = draft.value.cluster.regions.map((r: Data) => r.name);
  return message.replace(/^cluster\.(\w+)\[(\d+)\]\[(\d+)\]/, (path, key, a, b) => (LINKS[key] && names[a] && names[b] ? `${t(LINKS[key])}, ${names[a]} → ${names[b]}` : path));
}

function Tools(): JSX.Element {
  const name = draft.value.cluster.name ?? "cluster";
  const none = draft.value.cluster.regions.length === 0;
  // Of the fields as they are now: the file beside them follows a moment later, and not where they are wrong.
  const cluster = async (): Promise<void> => {
    const { problem: asked } = await requested();
    download(`${name}.yaml`, (await post("/clusters", { cluster: asked.cluster })).yaml, "application/yaml");
  };
  const problem = async (): Promise<void> => {
    const { problem: asked } = await requested();
    download(`${name}-problem.json`, JSON.stringify({ format: "polygon-problem", version: 1, ...asked }, null, 1), "application/json");
  };
  return (
    <Menu label={t("importExport")} id="cluster-menu">{(close) => <>
      <Upload label={t("upload")} id="import-cluster" take={(text, file) => { close(); void readCluster(text, file); }} />
      <Upload label={t("openMeasured")} id="import-measured" take={(text, file) => { close(); void readMeasured(text, file); }} />
      <button type="button" id="export-yaml" disabled={none} onClick={() => { close(); void attempt(cluster); }}>{t("exportCluster")}</button>
      <button type="button" disabled={none} onClick={() => { close(); void attempt(problem); }}>{t("exportProblem")}</button>
    </>}</Menu>
  );
}

/** Take what was measured into the cluster: the one that was chosen before, as it is when the answer comes. */
async function readMeasured(file: Promise<string>, name: string): Promise<void> {
  const before = arrived();
  const read = async (): Promise<Data> => {
    const [text] = await Promise.all([file, before]);
    for (;;) {
      const asked = draft.value.cluster;
      const found = await post("/measured", { problem: request().problem, text, name: name.slice(0, 120) });
      if (draft.value.cluster === asked) return found;
    }
  };
  await attempt(() => onceHere("measured", read(), (found) => {
    takeMeasured(found.cluster, found.measured);
    notice.value = t("measuredTaken", { n: found.measured.length });
  }));
}

export function addRegion(name: string, latitude?: number, longitude?: number): void {
  edit((d) => {
    const c = d.cluster;
    const taken = new Set(c.regions.map((r: Data) => r.name));
    let own = name;
    for (let i = 2; taken.has(own); i++) own = `${name}-${i}`;
    appendRegion(d, { name: own, ...(latitude === undefined ? {} : { latitude, longitude }), nodes: [{ device: "a100-80gb", count: 1, devices_per_node: 8 }] });
    const n = c.regions.length;
    for (const key of MATRICES) {
      if (key === "capacity_gbps" && !c[key]) continue;
      const old: Data[][] = c[key] ?? [];
      c[key] = Array.from({ length: n }, (_, i) => Array.from({ length: n }, (_, j) => old[i]?.[j] ?? null));
    }
    guessLinks(d, n - 1);
    selected.value = own;
  });
}
function removeRegion(r: number): void {
  edit((d) => {
    dropRegion(d, r);
    for (const key of MATRICES) if (d.cluster[key]) { d.cluster[key].splice(r, 1); d.cluster[key].forEach((line: Data[]) => line.splice(r, 1)); }
  });
}

/** Whether a value was measured, was given, or is what is assumed where nothing is. */
const Mark = ({ given, name = "" }: { given: boolean; name?: string }): JSX.Element => {
  const kind = isMeasured(name) ? "measured" : given && !isGuessed(name) ? "given" : "default";
  return <i class={`mark ${kind}`}>{t(kind === "measured" ? "measuredMark" : kind)}</i>;
};

function RegionForm({ r, full }: { r: number; full?: Data }): JSX.Element {
  const region = draft.value.cluster.regions[r];
  const at = `cluster.regions[${r}]`;
  const name = (text: string): void => batch(() => { selected.value = text; rename(r, text); });
  const set = (key: string, text: string): void => edit((d) => {
    const it = d.cluster.regions[r];
    if (text.trim() === "") delete it[key];
    else it[key] = number(text);
    if (key === "latitude" || key === "longitude") guessAgain(d, r);
  }, `${at}.${key}`);
  return (
    <Section title={region.name || t("region")} tools={<button type="button" class="small danger" onClick={() => removeRegion(r)}>{t("removeRegion")}</button>}>
      <div class="grid3">
        <Field label={t("name")} path={`${at}.name`} value={region.name} mode="text" set={name} />
        <Field label={t("latitude")} path={`${at}.latitude`} value={region.latitude} unit="°" set={(v) => set("latitude", v)} />
        <Field label={t("longitude")} path={`${at}.longitude`} value={region.longitude} unit="°" set={(v) => set("longitude", v)} />
        <Field label={t("egressPrice")} path={`${at}.egress_usd_per_gb`} value={region.egress_usd_per_gb} unit="$/GB" placeholder="0" mark={<Mark given={region.egress_usd_per_gb !== undefined} />} set={(v) => set("egress_usd_per_gb", v)} />
        <Field label={t("egressRate")} path={`${at}.egress_gbps`} value={region.egress_gbps} unit="Gbit/s" placeholder={t("noLimit")} mark={<Mark given={region.egress_gbps !== undefined} />} set={(v) => set("egress_gbps", v)} />
      </div>
      <LinkFields network title={t("insideRegion")} path={`${at}.intra_region`} name={`${regionId(r)}.intra_region`} link={region.intra_region} full={full?.intra_region} set={(v) => onCluster((c) => { if (v) c.regions[r].intra_region = v; else delete c.regions[r].intra_region; }, `${at}.intra_region`)} />
      <h3>{t("devices")}</h3>
      {region.nodes.map((_: Data, i: number) => <Nodes key={i} r={r} i={i} full={full?.nodes[i]} />)}
      <button type="button" class="small" onClick={() => onCluster((c) => { c.regions[r].nodes.push({ device: "t4", count: 1, devices_per_node: 4 }); })}>{t("addNodes")}</button>
    </Section>
  );
}

// A link: the name of a usual one, or latency and bandwidth; nothing given shows what is assumed.
function LinkFields({ title, path, name, link, full, network, ofDevice = false, set }: { title: string; path: string; name: string; link: Data; full?: Data; network?: boolean; ofDevice?: boolean; set: (link: Data) => void }): JSX.Element {
  const named = typeof link === "string" ? link : link?.link ?? "";
  const value = typeof link === "object" && !named ? link : {};
  const latency = value.latency_ms ?? (typeof value.latency_us === "number" ? value.latency_us / 1e3 : value.latency_us);
  const change = (key: string, text: string): void => {
    const rest = full ?? catalogue.value.default_link;
    const next: Data = { latency_ms: latency ?? rest.latency_ms, bandwidth_gbps: value.bandwidth_gbps ?? rest.bandwidth_gbps, ...("rdma" in value ? { rdma: value.rdma } : {}), [key]: number(text) };
    set(text.trim() === "" ? undefined : next);
  };
  return (
    <fieldset class="link-fields"><legend>{title} <Mark given={link !== undefined || ofDevice} name={name} /></legend>
      <Choice label={t("usualLink")} path={path} value={named} options={[["", link === undefined ? t("chooseLink") : t("ownNumbers")], ...(catalogue.value?.links ?? []).map((n: string): [string, string] => [n, n])]} set={(v) => set(v || undefined)} />
      <Field label={t("latencyOneWay")} path={`${path}.latency_ms`} value={latency} unit="ms" placeholder={full ? digits(full.latency_ms) : ""} set={(v) => change("latency_ms", v)} />
      <Field label={t("rate")} path={`${path}.bandwidth_gbps`} value={value.bandwidth_gbps} unit="Gbit/s" placeholder={full ? digits(full.bandwidth_gbps) : ""} set={(v) => change("bandwidth_gbps", v)} />
      {network && link !== undefined && !named && <Choice label={t("rdma")} path={`${path}.rdma`} value={String(value.rdma ?? "")} options={[["", t("rdmaByLatency")], ["true", t("rdmaYes")], ["false", t("rdmaNo")]]} set={(v) => { const { rdma: _, ...rest } = value; set(v ? { ...rest, rdma: v === "true" } : rest); }} />}
    </fieldset>
  );
}

function Nodes({ r, i, full }: { r: number; i: number; full?: Data }): JSX.Element {
  const region = draft.value.cluster.regions[r], node = region.nodes[i];
  const at = `cluster.regions[${r}].nodes[${i}]`;
  const set = (key: string, value: Data): void => onCluster((c) => {
    if (value === undefined || value === "") delete c.regions[r].nodes[i][key];
    else c.regions[r].nodes[i][key] = value;
  }, `${at}.${key}`);
  const own = Object.keys(draft.value.cluster.devices ?? {});
  const known = catalogue.value?.devices ?? [];
  const price = known.find((d: Data) => d.name === node.device)?.price_usd_per_hour;
  const links = [full?.intra_node, full?.inter_node].filter(Boolean).map((l) => `${gbps(l.bandwidth_gbps)}, ${ms(l.latency_ms)}`);
  return (
    <div class="nodes">
      <div class="grid4">
        <Choice label={t("device")} path={`${at}.device`} value={node.device} options={[...new Set<string>([node.device, ...own, ...known.map((d: Data) => d.name)])].map((d) => [d, d])} set={(v) => onCluster((c) => { c.regions[r].nodes[i].device = v; delete c.regions[r].nodes[i].intra_node; })} />
        <Field label={t("nodes")} path={`${at}.count`} value={node.count} mode="numeric" set={(v) => set("count", number(v))} />
        <Field label={t("perNode")} path={`${at}.devices_per_node`} value={node.devices_per_node} placeholder="1" mode="numeric" set={(v) => set("devices_per_node", v.trim() === "" ? "" : number(v))} />
        <Field label={t("price")} path={`${at}.price_usd_per_hour`} value={node.price_usd_per_hour} unit="$/h" placeholder={price === undefined ? "" : digits(price)} mark={<Mark given={node.price_usd_per_hour !== undefined} />} set={(v) => set("price_usd_per_hour", v.trim() === "" ? "" : number(v))} />
      </div>
      <details class="more"><summary>{t("nodeLinks")} <small class="soft">{links.join(" · ")}</small></summary>
        <LinkFields title={t("insideNode")} ofDevice={draft.value.cluster.devices?.[node.device]?.link !== undefined} path={`${at}.intra_node`} name={`${regionId(r)}.nodes[${i}].intra_node`} link={node.intra_node} full={full?.intra_node} set={(v) => set("intra_node", v)} />
        <LinkFields network title={t("betweenNodes")} path={`${at}.inter_node`} name={`${regionId(r)}.nodes[${i}].inter_node`} link={node.inter_node} full={full?.inter_node} set={(v) => set("inter_node", v)} />
        {region.nodes.length > 1 && <button type="button" class="small danger" onClick={() => edit((d) => dropNodes(d, r, i))}>{t("remove")}</button>}
      </details>
    </div>
  );
}

const ROWS = 12;
// Links of one region to all others: one way, and the way back where it differs.
function Links({ r, full }: { r: number; full: Data }): JSX.Element {
  const c = draft.value.cluster, n = c.regions.length;
  // Of many, none with the region's fields, then so many rows in a task.
  const [drawn, draw] = useState(n > ROWS ? 0 : n);
  useEffect(() => { const timer = drawn < n ? setTimeout(() => draw(drawn + ROWS)) : 0; return () => clearTimeout(timer); }, [drawn, n]);
  const same = (j: number): boolean => MATRICES.every((key) => (c[key]?.[r]?.[j] ?? null) === (c[key]?.[j]?.[r] ?? null));
  const [split, setSplit] = useKept<number[]>(`ways ${c.regions.map((it: Data) => it.name)} ${r}`, []);
  const put = (key: string, i: number, j: number, text: string, both: boolean): void => onCluster((it) => {
    it[key] ??= Array.from({ length: n }, () => Array.from({ length: n }, () => null));
    const value = text.trim() === "" ? null : number(text);
    it[key][i][j] = value;
    if (both) it[key][j][i] = value;
    if (key === "capacity_gbps" && it[key].every((line: Data[]) => line.every((v) => v === null))) delete it[key];
  }, `${key}[${i}][${j}]`);
  const known = (name: string): boolean => isMeasured(name) || isGuessed(name);
  const line = (i: number, j: number, both: boolean): JSX.Element[] => {
    const distance = placed(c.regions[i]) && placed(c.regions[j]) ? kmBetween([c.regions[i].longitude, c.regions[i].latitude], [c.regions[j].longitude, c.regions[j].latitude]) : null;
    const names = { a: c.regions[i].name, b: c.regions[j].name }, link = `${regionId(i)} > ${regionId(j)}`;
    const cell = (key: string, label: string, unit: string, placeholder = ""): JSX.Element => <td key={key}><Field hidden label={`${label}: ${names.a} → ${names.b}`} path={`cluster.${key}[${i}][${j}]`} value={c[key]?.[i]?.[j] ?? ""} unit={unit} placeholder={placeholder} allowed={{ least: 0, optional: true }} set={(v) => put(key, i, j, v, both)} />{known(`${link}.${key}`) && <Mark given name={`${link}.${key}`} />}</td>;
    const other = full?.regions.length === n ? c.latency_ms?.[i]?.[j] : null;
    return [
      <th scope="row" key="name">{both ? names.b : `${names.a} → ${names.b}`}<small class="soft">{distance === null ? "" : ` ${whole(distance)} km`}</small></th>,
      cell("latency_ms", t("latencyOneWay"), "ms"),
      <td key="rtt" class="number soft">{typeof other === "number" ? ms(2 * other) : "—"}</td>,
      cell("bandwidth_gbps", t("rate"), "Gbit/s"), cell("capacity_gbps", t("capacity"), "Gbit/s", t("noLimit")),
    ];
  };
  const suggest = (): void => edit((d) => { for (let j = 0; j < n; j++) if (j !== r) for (const [a, b] of [[r, j], [j, r]]) guessLatency(d, a, b); });
  return (
    <Section title={t("linksOf", { name: c.regions[r].name || t("region") })} tools={<button type="button" class="small" onClick={suggest}>{t("suggest")}</button>}>
      <div class="scroll" tabIndex={0} role="group" aria-label={t("links")}><table class="edit">
        <thead><tr><th scope="col">{t("to")}</th><th scope="col">{t("latencyOneWay")}</th><th scope="col" class="number">{t("roundTrip")}</th><th scope="col">{t("rate")}</th><th scope="col">{t("capacity")}</th><th scope="col">{t("ways")}</th></tr></thead>
        <tbody>{c.regions.flatMap((_: Data, j: number) => {
          if (j === r || j >= drawn) return [];
          const both = same(j) && !split.includes(j);
          const flip = (): void => {
            if (both) return setSplit([...split, j]);
            onCluster((it) => { for (const key of MATRICES) if (it[key]) it[key][j][r] = it[key][r][j]; });
            setSplit(split.filter((x) => x !== j));
          };
          const tick = <td key="way"><label class="check"><input type="checkbox" checked={both} aria-label={`${t("bothWays")}: ${c.regions[r].name}, ${c.regions[j].name}`} onChange={flip} />{t("bothWays")}</label></td>;
          return both ? [<tr key={j}>{line(r, j, true)}{tick}</tr>] : [<tr key={j}>{line(r, j, false)}{tick}</tr>, <tr key={`${j} back`}>{line(j, r, false)}<td /></tr>];
        })}</tbody>
      </table></div>
    </Section>
  );
}

// Devices that are not the catalogue's, and what holds for the whole cluster.
function Devices(): JSX.Element {
  const c = draft.value.cluster;
  const devices: [string, Data][] = Object.entries(c.devices ?? {});
  const put = (name: string, key: string, text: string): void => onCluster((it) => {
    const device = it.devices[name];
    if (key.startsWith("tflops.")) device.tflops = { ...device.tflops, [key.slice(7)]: number(text) };
    else device[key] = number(text);
    for (const [precision, v] of Object.entries(device.tflops)) if (v === "") delete device.tflops[precision];
  }, `${name}.${key}`);
  // The one that was just added or named is open.
  const [fresh, setFresh] = useState("");
  const add = (): void => onCluster((it) => {
    let name = "my-device";
    for (let i = 2; it.devices?.[name]; i++) name = `my-device-${i}`;
    setFresh(name);
    it.devices = { ...it.devices, [name]: { memory_gib: 24, tflops: { fp32: 30, bf16: 120 }, memory_bandwidth_gb_per_s: 900, power_w: 300, price_usd_per_hour: 1 } };
  });
  const call = (old: string, field: HTMLInputElement): void => {
    const name = field.value.trim();
    const isOwn = renameDevice(old, name);
    trouble.value = isOwn ? "" : t("deviceNameTaken", { name: name || "—" });
    if (isOwn) setFresh(name);
    else field.value = old;
  };
  const used = (name: string): boolean => c.regions.some((r: Data) => r.nodes.some((node: Data) => node.device === name));
  return (
    <Section title={t("ownDevices")} note={t("ownDevicesNote")} tools={<button type="button" class="small" onClick={add}>{t("addDevice")}</button>}>
      {devices.map(([name, d], i) => (
        <details class="more" key={i} open={name === fresh}><summary>{name}{isMeasured(`device.${name}`) && <Mark given name={`device.${name}`} />}</summary><div class="grid3">
          <label class="field"><span>{t("name")}</span><span class="input"><input value={name} data-path={`cluster.devices.${name}`} autocomplete="off" spellcheck={false} onInput={(e) => call(name, e.currentTarget)} /></span></label>
          <Choice label={t("architecture")} path={`cluster.devices.${name}.architecture`} value={d.architecture ?? ""} options={[["", t("architectureOther")], ...[...new Set<string>([...(catalogue.value?.architectures ?? []), d.architecture].filter(Boolean))].map((a): [string, string] => [a, a])]} set={(v) => onCluster((it) => { if (v) it.devices[name].architecture = v; else delete it.devices[name].architecture; })} />
          <Field label={t("memory")} path={`cluster.devices.${name}.memory_gib`} value={d.memory_gib ?? d.memory_gb} unit={d.memory_gib !== undefined ? "GiB" : "GB"} set={(v) => put(name, d.memory_gib !== undefined ? "memory_gib" : "memory_gb", v)} />
          <Field label={t("memoryRate")} path={`cluster.devices.${name}.memory_bandwidth_gb_per_s`} value={d.memory_bandwidth_gb_per_s} unit="GB/s" set={(v) => put(name, "memory_bandwidth_gb_per_s", v)} />
          <Field label={t("power")} path={`cluster.devices.${name}.power_w`} value={d.power_w} unit="W" set={(v) => put(name, "power_w", v)} />
          <Field label={t("price")} path={`cluster.devices.${name}.price_usd_per_hour`} value={d.price_usd_per_hour} unit="$/h" set={(v) => put(name, "price_usd_per_hour", v)} />
          {["fp32", "tf32", "fp16", "bf16", "fp8"].map((p) => <Field key={p} label={p} path={`cluster.devices.${name}.tflops.${p}`} value={d.tflops[p]} unit="TFLOP/s" set={(v) => put(name, `tflops.${p}`, v)} />)}
        </div>{used(name) ? <p class="soft">{t("deviceUsed")}</p> : <button type="button" class="small danger" aria-label={`${t("remove")}: ${name}`} onClick={() => onCluster((it) => { delete it.devices[name]; if (!Object.keys(it.devices).length) delete it.devices; })}>{t("remove")}</button>}</details>))}
      <div class="grid3"><Field label={t("name")} path="cluster.name" value={c.name} mode="text" set={(v) => onCluster((it) => { it.name = v; }, "cluster.name")} />
        <Field label={t("ownersStages")} path="cluster.stages" value={c.stages} mode="numeric" placeholder={t("plannersChoice")} set={(v) => onCluster((it) => { if (v.trim() === "") delete it.stages; else it.stages = number(v); }, "cluster.stages")} /></div>
    </Section>
  );
}
