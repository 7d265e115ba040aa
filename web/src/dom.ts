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

export function escape(text: string): string {
  return text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
}
