// Numbers as people read them.

/** A whole number with commas; the browser's own way loads its tables of languages first. */
export const whole = (value: number): string => String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, ",");
export function digits(value: number, count = 3): string {
  if (!Number.isFinite(value)) return "∞";
  if (value === 0) return "0";
  const short = Number(value.toPrecision(count));
  return Math.abs(short) >= 1000 ? whole(value) : String(short); // 999.6, too, as the command line writes it
}
// A long name without its middle, as names differ at their ends.
export function brief(name: string, most: number): string {
  return name.length <= most ? name : `${name.slice(0, Math.ceil((most - 1) * 0.6))}…${name.slice(-Math.floor((most - 1) * 0.4))}`;
}
// Equal neighbours once, with their number: 4 × 16, 8.
export function runs(values: number[]): string {
  const parts: [number, number][] = [];
  for (const v of values) if (parts.length && parts[parts.length - 1][1] === v) parts[parts.length - 1][0]++; else parts.push([1, v]);
  return parts.map(([n, v]) => (n > 1 ? `${n} × ${v}` : String(v))).join(", ");
}
// Always three digits, so that columns line up: 13.0, 9.88.
function three(value: number): string {
  return Math.abs(value) >= 999.5 ? digits(value) : Number(value.toPrecision(3)).toFixed(Math.max(0, 2 - Math.floor(Math.log10(Math.abs(Number(value.toPrecision(3)))))));
}
const SECONDS = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]] as const;
const BYTES = [["PB", 1e15], ["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]] as const;
function scaled(value: number, units: readonly (readonly [string, number])[], write: (v: number) => string): string {
  if (!Number.isFinite(value)) return "∞";
  const size = Math.abs(value) * (1 + 1e-9);
  if (size < 1e-9) return `0\u00a0${units === SECONDS ? "s" : units === BYTES ? "B" : units[units.length - 1][0]}`;
  const [unit, scale] = units.find(([, s]) => size >= s) ?? units[units.length - 1];
  return `${write(value / scale)}\u00a0${unit}`;
}
export const seconds = (value: number): string => scaled(value, SECONDS, three);
export const bytes = (value: number): string => scaled(value, BYTES, (v) => (Math.abs(value) < 1e3 ? String(Math.round(v)) : three(v)));
// The same without trailing zeros, for axes.
export const roundSeconds = (value: number): string => scaled(value, SECONDS, digits);
/** A moment of a step as an axis names it whose marks lie so far apart: with as many digits as tell them apart. */
export function secondsTo(value: number, apart: number): string {
  return scaled(value, SECONDS, (v) => {
    const places = Math.max(0, Math.ceil(-Math.log10((apart * v) / value) - 1e-9));
    return places === 0 ? whole(v) : String(Number(v.toFixed(Math.min(places, 9))));
  });
}
export const roundBytes = (value: number): string => scaled(value, BYTES, digits);
const WATT_HOURS = [["MWh", 3.6e9], ["kWh", 3.6e6], ["Wh", 3.6e3], ["mWh", 3.6]] as const;
/** Of joules. */
export const energy = (joules: number): string => scaled(joules, WATT_HOURS, three);
/** As `{n:memory}` of polygon/domain/message.py. */
export function ofMemory(value: number): string {
  if (value >= 2 ** 40) return `${(value / 2 ** 40).toFixed(1)}\u00a0TiB`;
  return value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)}\u00a0GiB` : `${(value / 2 ** 20).toFixed(1)}\u00a0MiB`;
}
// One decimal below a hundred: 16.0 %, 0.6 %, < 0.1 %.
export function percent(value: number): string {
  if (!Number.isFinite(value)) return "∞";
  const size = Math.abs(value) * 100;
  if (size > 0 && size < 0.05) return "<\u00a00.1\u00a0%";
  return size === 0 || size === 100 ? `${value * 100}\u00a0%` : `${size < 99.95 ? (value * 100).toFixed(1) : whole(value * 100)}\u00a0%`;
}
export function signed(value: number, show: (v: number) => string): string {
  const text = show(Math.abs(value));
  return value === 0 || text.startsWith("<") ? text : (value < 0 ? "−" : "+") + text;
}
// When something was made: the time of today, the day before that. The browser's own formats take 10 ms to be there.
export function moment(made_s: number, chinese: boolean): string {
  const at = new Date(made_s * 1e3), date = at.toDateString();
  const time = [at.getHours(), at.getMinutes()].map((part) => String(part).padStart(2, "0")).join(":");
  if (date === new Date().toDateString()) return time;
  return chinese ? `${at.getMonth() + 1}月${at.getDate()}日 ${time}` : `${at.getDate()} ${date.slice(4, 7)} ${time}`;
}

// A rate or another number with its SI prefix: 400 Gbit/s, 1.6 Tbit/s.
export function gbps(value: number): string {
  if (!Number.isFinite(value)) return "∞";
  const [scale, unit] = value >= 1000 ? [1e-3, "Tbit/s"] : value < 1 ? [1e3, "Mbit/s"] : [1, "Gbit/s"];
  return `${digits(value * scale)}\u00a0${unit}`;
}
export const ms = (value: number): string => seconds(value / 1e3);
export function usd(value: number): string {
  if (!Number.isFinite(value)) return "∞";
  return `$\u2009${value === 0 ? 0 : three(value)}`;
}
