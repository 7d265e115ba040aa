// Colours of places and of use, the same on the map, the strip, the timeline and the charts.

import { signal } from "@preact/signals";

const media = matchMedia("(prefers-color-scheme: dark)");
const chosen = (): boolean => {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : media.matches;
};
const remembered = localStorage.getItem("polygon-theme");
if (remembered) document.documentElement.dataset.theme = remembered;
export const dark = signal(chosen());
media.addEventListener("change", () => (dark.value = chosen()));
export function toggleTheme(): void {
  document.documentElement.dataset.theme = dark.value ? "light" : "dark";
  localStorage.setItem("polygon-theme", document.documentElement.dataset.theme);
  dark.value = chosen();
}
export const still = (): boolean => matchMedia("(prefers-reduced-motion: reduce)").matches;

const LIGHT = ["#3a6ea5", "#b0632a", "#3f7f5c", "#7a5aa8", "#a34a63", "#2f7f8a", "#837125", "#5c66ab", "#5a7f3a", "#93584c"];
const DARK = ["#7ba7d9", "#d99a62", "#79b894", "#ae93d6", "#d68aa0", "#6cb7c2", "#c0ac5c", "#98a2e0", "#97bd74", "#cc9388"];
export const palette = (): string[] => (dark.value ? DARK : LIGHT);
export const regionColor = (index: number): string => palette()[index % LIGHT.length];

/** One scale for links, 0 idle to 1 never silent: slate, amber, red. */
export function useColor(busy: number): string {
  const stops = dark.value ? [[110, 124, 145], [217, 164, 65], [228, 95, 80]] : [[120, 134, 154], [196, 132, 24], [188, 52, 40]];
  const x = Math.min(1, Math.max(0, busy)) * 2;
  const [a, b] = x < 1 ? [stops[0], stops[1]] : [stops[1], stops[2]];
  const part = x < 1 ? x : x - 1;
  return `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * part)).join(",")})`;
}
export const kindColors = (): Record<string, string> =>
  dark.value
    ? { F: "#5b8fca", B: "#4d9a76", exposed: "#d98a4b", update: "#a98ad0", reduce: "#8a6a50", send: "#75808f", idle: "#23272e", other: "#3a414b" }
    : { F: "#5a8bc4", B: "#5aa381", exposed: "#cf7a35", update: "#8868b5", reduce: "#dcb596", send: "#98a1ad", idle: "#e9ecf0", other: "#cbd2da" };
export const ink = (): { text: string; soft: string; line: string; land: string; sea: string; panel: string } =>
  dark.value
    ? { text: "#dfe3e8", soft: "#98a1ad", line: "#33383f", land: "#2c323a", sea: "#1d2126", panel: "#191c20" }
    : { text: "#1b1f24", soft: "#59636f", line: "#d9dde2", land: "#e3e7eb", sea: "#f7f9fa", panel: "#ffffff" };
