/**
 * Parts of the address that this page does not know: a view, a selected name, a choice. They have
 * no effect, and the page says so, because a link may come from the page of another recording.
 */
import { computed } from "@preact/signals";
import { page } from "../store/page";
import { formatRoute, type Route, route } from "../store/route";
import { FACETS, type Facet, listKnown, nameFacet, paramOf } from "../store/selection";
import { findView, VIEWS } from "../views";
import type { ViewParams } from "../views/view";

export interface UnknownPart {
  readonly param: string; // of the address; empty for the view
  readonly label: string; // `axis`
  readonly value: string;
  readonly reason: string; // `there are dp and tp`
}

const MAX_NAMES = 6;
const MAX_LETTERS = 60;

const ALL_VIEWS: ViewParams = {
  theme: ["light", "dark"],
  tree: /^(open|closed)?(\.x?\d+)*$/,
  q: /^/,
  differences: ["all", "changed"],
};

export const unknownParts = computed(() => listUnknownParts(route.value));

export function listUnknownParts({ view, params }: Route): UnknownPart[] {
  const parts: UnknownPart[] = [];
  if (!VIEWS.some(({ id }) => id === view)) {
    const names = nameSome(VIEWS.map(({ id }) => id));
    parts.push({
      param: "",
      label: "view",
      value: view,
      reason: `the overview is shown; there are ${names}`,
    });
  }
  const ofView = findView(view).params?.(page.value) ?? {};
  const facetOf = new Map(FACETS.map((facet) => [paramOf(facet), facet] as const));
  for (const [param, value] of Object.entries(params)) {
    const facet = facetOf.get(param);
    const reason = facet
      ? judgeFacet(facet, value)
      : judgeChoice(param, value, { ...ALL_VIEWS, ...ofView });
    if (reason) parts.push({ param, label: facet ? nameFacet(facet) : param, value, reason });
  }
  return parts;
}

/** Why a facet does not have this value; empty if it does. */
function judgeFacet(facet: Facet, value: string): string {
  const known = listKnown(facet);
  if (typeof known === "function") return known(value);
  if (known.includes(value)) return "";
  return known.length ? nameKnown(known) : "this page has none";
}

function judgeChoice(param: string, value: string, choices: ViewParams): string {
  if (param.startsWith("sort.")) return ""; // the table says so
  const known = choices[param];
  if (known === undefined) return "the view has no such choice";
  if (known instanceof RegExp) return known.test(value) ? "" : "it is not understood";
  if (known.includes(value)) return "";
  return known.length ? nameKnown(known) : "this page has none";
}

function nameKnown(names: readonly string[]): string {
  return `there ${names.length === 1 ? "is" : "are"} ${nameSome(names)}`;
}

/** `dp, tp and pp`; of many names, the first ones. */
function nameSome(names: readonly string[]): string {
  const shown = names.slice(0, MAX_NAMES).map((name) => shorten(name || "no axis"));
  if (names.length > MAX_NAMES) return `${shown.join(", ")} and ${names.length - MAX_NAMES} more`;
  const last = shown.pop()!;
  return shown.length ? `${shown.join(", ")} and ${last}` : last;
}

export function shorten(text: string): string {
  return text.length > MAX_LETTERS ? `${text.slice(0, MAX_LETTERS)}…` : text;
}

/** The address without its unknown parts. */
export function removeUnknown(from: Route, parts: readonly UnknownPart[]): Route {
  const removed = new Set(parts.map(({ param }) => param));
  return {
    view: findView(from.view).id,
    params: Object.fromEntries(Object.entries(from.params).filter(([name]) => !removed.has(name))),
  };
}

export function clearedHref(): string {
  return formatRoute(removeUnknown(route.value, unknownParts.value));
}
