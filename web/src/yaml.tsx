// The cluster's file beside the fields, both editable.

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { copy } from "./api";
import { unread } from "./draft";
import { discard, readSoon, typed } from "./file";
import { focusSoon } from "./focus";
import { t } from "./strings";

export function Yaml({ yaml, old }: { yaml: string; old: boolean }): JSX.Element {
  const [text, setText] = useState(unread.value?.text ?? yaml);
  const [copied, setCopied] = useState(false);
  const typing = useRef(false);
  const { fault = "" } = unread.value ?? {};
  useEffect(() => { if (unread.value && !unread.value.fault) readSoon(); }, []); // typed just before a reload
  // The fields have changed: the file follows, unless somebody is writing in it or what is written is not read.
  useEffect(() => { if (!typing.current && !unread.value) setText(yaml); }, [yaml, unread.value]);
  const back = (): void => { discard(); setText(yaml); focusSoon("yaml"); };
  return (
    <section class="yaml" aria-label={t("file")}>
      <div class="section-head"><h2>{t("file")}</h2><span class="soft">YAML</span><span class="grow" />
        <button type="button" class="small" onClick={() => void copy(text).then(() => { setCopied(true); setTimeout(() => setCopied(false), 1500); })}>{t(copied ? "copied" : "copy")}</button></div>
      {old && !fault && <p class="soft" id="yaml-old">{t("fileOld")}</p>}
      {fault && <div class="row middle"><p class="error" role="alert" id="yaml-error">{fault}</p><button type="button" class="small" id="yaml-back" onClick={back}>{t("fileBack")}</button></div>}
      <textarea id="yaml" aria-label={t("file")} aria-invalid={fault ? true : undefined} aria-describedby={fault ? "yaml-error" : undefined} spellcheck={false} value={text}
        onInput={(e) => { typing.current = true; setText(e.currentTarget.value); typed(e.currentTarget.value); }}
        onBlur={() => { typing.current = false; if (!unread.value) setText(yaml || text); }} />
    </section>
  );
}
