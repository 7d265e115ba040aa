// The cluster's file beside the fields: what is typed here is read by the server and becomes the draft.

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { copy, post } from "./api";
import { draft, edit } from "./draft";
import { t } from "./strings";

export function Yaml({ yaml }: { yaml: string }): JSX.Element {
  const [text, setText] = useState(yaml);
  const [error, setError] = useState("");
  const [copied, setCopied] = useState(false);
  const typing = useRef(false);
  const timer = useRef(0);
  // The fields have changed: the file follows, unless somebody is writing in it.
  useEffect(() => { if (!typing.current) { setText(yaml); setError(""); } }, [yaml]);
  const change = (now: string): void => {
    setText(now);
    typing.current = true;
    clearTimeout(timer.current);
    timer.current = window.setTimeout(() => {
      post("/read", { kind: "cluster", text: now, name: draft.value.cluster.name || "cluster" })
        .then((cluster) => { setError(""); edit((d) => { d.cluster = cluster; }, "yaml"); })
        .catch((e: Error) => setError(e.message));
    }, 350);
  };
  return (
    <section class="yaml" aria-label={t("file")}>
      <div class="section-head"><h2>{t("file")}</h2><span class="soft">YAML</span><span class="grow" />
        <button type="button" class="small" onClick={() => void copy(text).then(() => { setCopied(true); setTimeout(() => setCopied(false), 1500); })}>{t(copied ? "copied" : "copy")}</button></div>
      {error && <p class="error" role="alert" id="yaml-error">{error}</p>}
      <textarea id="yaml" aria-label={t("file")} spellcheck={false} value={text} onInput={(e) => change(e.currentTarget.value)} onBlur={() => { typing.current = false; if (!error) setText(yaml || text); }} />
    </section>
  );
}
