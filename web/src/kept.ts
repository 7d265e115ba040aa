// What a reload of the tab must not lose, by its name: what was typed and chosen outside the draft.

import { effect, signal, type Signal } from "@preact/signals";
import { useState } from "preact/hooks";

function read<T>(name: string, first: T): T {
  try {
    return JSON.parse(sessionStorage.getItem(`polygon-${name}`) ?? "null") ?? first;
  } catch {
    return first;
  }
}
function write(name: string, value: unknown): void {
  try {
    sessionStorage.setItem(`polygon-${name}`, JSON.stringify(value));
  } catch {
    sessionStorage.removeItem(`polygon-${name}`); // too large for the browser's quota
  }
}
export function keptSignal<T>(name: string, first: T): Signal<T> {
  const kept = signal(read(name, first));
  effect(() => write(name, kept.value));
  return kept;
}
/** As `useState`; a part of the page that is drawn anew under the same name goes on where it was. */
export function useKept<T>(name: string, first: T): [T, (value: T) => void] {
  const [value, set] = useState(() => read(name, first));
  return [value, (next) => { write(name, next); set(next); }];
}
