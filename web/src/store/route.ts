/** The current view and its parameters, kept in the address so that links can be shared. */
import { signal } from "@preact/signals";

export interface Route {
  readonly view: string;
  readonly params: Readonly<Record<string, string>>;
}

/** The parameter for each facet of the selection. Do not rename one: links must stay valid. */
export const SELECTION_PARAMS = {
  module: "m",
  axis: "axis",
  kind: "kind",
  phase: "phase",
  cause: "cause",
  line: "line",
  dtype: "dtype",
  rank: "rank",
  step: "step",
  range: "range",
} as const;

/** Parameters that stay when the view changes; others belong to one view. */
const GLOBAL_PARAMS: readonly string[] = [
  ...Object.values(SELECTION_PARAMS),
  ...["q", "theme", "tree"],
];

export const route = signal<Route>({ view: "overview", params: {} });

export function parseRoute(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#?\/?/, "").split(/\?(.*)/s);
  return { view: path || "overview", params: Object.fromEntries(new URLSearchParams(query)) };
}

export function formatRoute({ view, params }: Route): string {
  const query = new URLSearchParams(Object.entries(params).sort()).toString();
  return query ? `#/${view}?${query}` : `#/${view}`;
}

/** A route with some parameters changed; null removes one. Another view drops the view's own ones. */
export function changeRoute(
  from: Route,
  view: string,
  changes: Readonly<Record<string, string | null>> = {},
): Route {
  const keptParams = Object.entries(from.params).filter(
    ([name]) => view === from.view || GLOBAL_PARAMS.includes(name),
  );
  const params = Object.entries({ ...Object.fromEntries(keptParams), ...changes });
  return {
    view,
    params: Object.fromEntries(
      params.filter((entry): entry is [string, string] => entry[1] !== null),
    ),
  };
}

/** Address of a view, with the current selection, search and theme. */
export function hrefTo(
  view: string,
  changes: Readonly<Record<string, string | null>> = {},
): string {
  return formatRoute(changeRoute(route.value, view, changes));
}

export function navigate(to: Route, { isReplacing = false } = {}): void {
  route.value = to;
  try {
    if (isReplacing) history.replaceState(null, "", formatRoute(to));
    else history.pushState(null, "", formatRoute(to));
  } catch {
    // A page inside another document (a notebook) may have no address of its own to change.
  }
}

/** A parameter of the view that is shown. */
export function param(name: string): string | undefined {
  return route.value.params[name];
}

/** Sets a parameter of the view; the back button undoes it unless the entry is replaced. */
export function setParam(name: string, value: string | null, { isReplacing = false } = {}): void {
  navigate(changeRoute(route.value, route.value.view, { [name]: value }), { isReplacing });
}

/** Reads the address, and follows changes of it and links to views from now on. */
export function followAddress(): void {
  const read = (): void => {
    route.value = parseRoute(location.hash);
  };
  read();
  addEventListener("hashchange", read);
  addEventListener("popstate", read);
  document.addEventListener("click", followLink);
}

/** Inside a notebook the browser would take `#/…` for an address of the notebook's. */
function followLink(event: MouseEvent): void {
  if (event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) {
    return;
  }
  const link = (event.target as Element | null)?.closest?.("a[href^='#/']");
  if (!link) return;
  event.preventDefault();
  navigate(parseRoute(link.getAttribute("href") ?? ""));
}
