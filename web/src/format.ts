// Numbers as people read them.

export function digits(value: number, count = 3): string {
  if (!Number.isFinite(value)) return "∞";
  if (value === 0) return "0";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(count)));
}
export function seconds(value: number): string {
  const size = Math.abs(value);
  if (!Number.isFinite(value)) return "∞";
  if (size >= 1 || size === 0) return `${digits(value)} s`;
  return size >= 1e-3 ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} µs`;
}
export function bytes(value: number): string {
  for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]] as const) if (value >= scale) return `${digits(value / scale)} ${unit}`;
  return `${Math.round(value)} B`;
}
export function gib(value: number): string {
  return `${digits(value / 2 ** 30)} GiB`;
}
export function percent(value: number): string {
  return `${digits(value * 100)} %`;
}
export function signed(value: number, show: (v: number) => string): string {
  return (value < 0 ? "−" : "+") + show(Math.abs(value));
}
