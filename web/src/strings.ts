// Every word of the page, in English and Chinese: from the catalogue that the server shares.

import { page as catalogue } from "../../polygon/web/strings.json";

export type Key = keyof typeof catalogue;
export type Language = "en" | "zh";
let language: Language = (localStorage.getItem("polygon-language") as Language) || (navigator.language.startsWith("zh") ? "zh" : "en");

export const currentLanguage = (): Language => language;
export function setLanguage(to: Language): void {
  language = to;
  localStorage.setItem("polygon-language", to);
  document.documentElement.lang = to === "zh" ? "zh-CN" : "en";
}
export function t(key: Key, values: Record<string, string | number> = {}): string {
  return catalogue[key][language === "zh" ? 1 : 0].replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
}
export function maybe(key: string): string {
  return key in catalogue ? t(key as Key) : key;
}
