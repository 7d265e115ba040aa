// What has the focus may go away: a row that is deleted, a button that was pressed, a pane. The browser then begins at the
// top of the page again; here the focus goes to what is nearest.

const TABBABLE = "a[href], button:not(:disabled, [tabindex='-1']), input:not(:disabled), select, textarea, summary, [tabindex='0']";
interface Place { element: HTMLElement; at: number }
/** What has the focus, what that lies in, and so on; each with its number among its siblings. */
let places: Place[] = [];

function nearest(): HTMLElement | null {
  const again = places[0].element.id && document.getElementById(places[0].element.id);
  if (again) return again;
  const gone = places.findIndex((place) => place.element.isConnected);
  for (let i = Math.max(1, gone); i < places.length; i++) {
    const { element } = places[i];
    if (element.hasAttribute("tabindex")) return element;
    const beside = element.children[Math.min(places[i - 1].at, element.children.length - 1)];
    const found = [beside, element].flatMap((e) => (e ? [e, ...e.querySelectorAll(TABBABLE)] : []))
      .find((e) => e.matches(TABBABLE) && e.checkVisibility());
    if (found) return found as HTMLElement;
  }
  return null;
}
/** Watch over the focus inside an element. */
export function keepFocus(root: HTMLElement): void {
  addEventListener("focusin", (e) => {
    places = [];
    for (let element = e.target as HTMLElement | null; element && element !== root.parentElement; element = element.parentElement)
      places.push({ element, at: [...(element.parentElement?.children ?? [])].indexOf(element) });
  });
  // Who clicks beside everything wants nothing in focus.
  addEventListener("focusout", ({ target }) => setTimeout(() => {
    if ((target as HTMLElement).isConnected && document.activeElement === document.body) places = [];
  }));
  new MutationObserver(() => {
    if (document.activeElement !== document.body || !places.length || places[0].element.isConnected) return;
    // A dialog that closes gives the focus back to what had it, if anything did.
    if (places.some(({ element }) => element.tagName === "DIALOG")) return void (places = []);
    nearest()?.focus({ preventScroll: true });
  }).observe(root, { childList: true, subtree: true });
}
/** Give the focus to what is there a moment later. */
export const focusSoon = (id: string): void => { setTimeout(() => document.getElementById(id)?.focus()); };
