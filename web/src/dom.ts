// Elements without a framework: h("button", { class: "x", onclick: f }, "text").

type Child = Node | string | number | null | undefined | false | Child[];
type Attributes = Record<string, unknown>;

export function h<K extends keyof HTMLElementTagNameMap>(tag: K, attributes: Attributes = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value as EventListener);
    else if (name === "value" || name === "checked" || name === "selected") (element as unknown as Attributes)[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

function add(parent: Node, children: Child[]): void {
  for (const child of children) {
    if (Array.isArray(child)) add(parent, child);
    else if (child !== null && child !== undefined && child !== false) parent.appendChild(typeof child === "object" ? child : document.createTextNode(String(child)));
  }
}

export function table(caption: string, head: Child[], rows: Child[][], numeric: number[] = [], extra: Attributes = {}): HTMLElement {
  return h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": caption },
    h("table", extra, h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, head.map((cell, i) => cell === "" ? h("td", {}) : h("th", { scope: "col", class: numeric.includes(i) ? "number" : undefined }, cell)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) => h("td", { class: numeric.includes(i) ? "number" : undefined }, cell)))))));
}

// What an answer shows in a place; its error where there is none.
export function into<T>(id: string, answer: Promise<T>, show: (data: T) => void): void {
  void answer.then(show).catch((e: Error) => document.getElementById(id)?.replaceChildren(h("p", { class: "error", role: "alert" }, e.message)));
}

// Fields with their label; `path` is where the validator's messages say that they are.
export function field(label: string, path: string, value: unknown, set: (text: string) => void, more: Attributes = {}): HTMLElement {
  return h("label", {}, label, h("input", { value: value ?? "", "data-path": path, onchange: (e: Event) => set((e.target as HTMLInputElement).value), ...more }));
}
export function choice(label: string, path: string, value: string, options: [string, string][], set: (text: string) => void): HTMLElement {
  return h("label", {}, label, h("select", { "data-path": path, onchange: (e: Event) => set((e.target as HTMLSelectElement).value) }, options.map(([key, text]) => h("option", { value: key, selected: key === value }, text))));
}
export function chips(label: string, path: string, options: string[], chosen: string[], set: (chosen: string[]) => void): HTMLElement {
  const change = (option: string, on: boolean): void => set((chosen = options.filter((o) => (o === option ? on : chosen.includes(o)))));
  return h("fieldset", { class: "chips", "data-path": path, tabindex: "-1" }, h("legend", {}, label), h("div", {}, options.map((option) =>
    h("label", {}, h("input", { type: "checkbox", value: option, checked: chosen.includes(option), onchange: (e: Event) => change(option, (e.target as HTMLInputElement).checked) }), h("span", {}, option)))));
}
export function upload(label: string, id: string, take: (text: string, name: string) => void, hint = ""): HTMLElement {
  const name = h("span", { class: "soft" }, hint);
  const read = async (input: HTMLInputElement): Promise<void> => {
    const file = input.files?.[0];
    if (!file) return;
    name.textContent = file.name;
    take(await file.text(), file.name.replace(/\.\w+$/, "") || "upload");
  };
  return h("label", { class: "upload" }, h("input", { type: "file", id, onchange: (e: Event) => void read(e.target as HTMLInputElement) }), h("span", { class: "button" }, label), name);
}
export const number = (text: string): number | string => (text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : text);

export function escape(text: string): string {
  return text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
}
