// Every word of the page, in English and Chinese: from the catalogue that the server shares.

import { signal } from "@preact/signals";
import { page as catalogue } from "../../polygon/web/strings.json";

export type Key = keyof typeof catalogue;
export type Language = "en" | "zh";
const remembered = localStorage.getItem("polygon-language") as Language;
export const language = signal<Language>(remembered || (navigator.language.startsWith("zh") ? "zh" : "en"));

/** A runtime; what the catalogue says of its version is English prose. */
export const programName = (r: { name: string; version: string }): string =>
  language.value === "zh" || !r.version ? r.name : `${r.name} · ${r.version}`;
export function setLanguage(to: Language): void {
  localStorage.setItem("polygon-language", to);
  document.documentElement.lang = to === "zh" ? "zh-CN" : "en";
  language.value = to;
  document.title = t("title");
}
const HAN = /^\p{Script=Han}$/u;
/** The words of a key with its values; `{n:device|devices}` is a number and its noun. */
export function t(key: Key, values: Record<string, string | number> = {}): string {
  const words = catalogue[key][language.value === "zh" ? 1 : 0];
  // Chinese is set apart from what is not: between it and a Chinese value there is no gap.
  const isHan = (character = ""): boolean => language.value === "zh" && HAN.test(character);
  return words.replace(/((?<=\p{Script=Han}) )?\{(\w+)(?::([^|}]+)\|([^}]+))?\}( (?=\p{Script=Han}))?/gu, (_, before = "", name, one, many, after = "") => {
    const value = String(values[name] ?? "");
    return `${isHan(value[0]) ? "" : before}${value}${one ? ` ${value === "1" ? one : many}` : ""}${isHan(value[value.length - 1]) ? "" : after}`;
  });
}
/** The words of a key that the server gave; the key itself where there are none. */
export function maybe(key: string): string {
  return key in catalogue ? t(key as Key) : key;
}
