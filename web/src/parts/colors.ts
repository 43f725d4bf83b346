/** Colours that are distinguishable with colour blindness, in light and dark (see styles/theme.css). */
import { theme } from "../store/theme";

const NUM_SERIES = 8;

/** Colour of the nth series, for style sheets and SVG; -1 is grey. */
export function seriesColor(index: number): string {
  return `var(${seriesVariable(index)})`;
}

function seriesVariable(index: number): string {
  return index < 0 ? "--series-none" : `--series-${(index % NUM_SERIES) + 1}`;
}

/** What collectives are coloured by. */
export type ColorFacet = "axis" | "kind" | "phase";

// A name has the same colour on every page. Phases take colours from the end of the list.
const KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast"];
const RARE_KINDS = ["recv", "reduce", "gather", "scatter"];
const PHASES = ["outside", "optimizer", "recompute", "backward", "forward"];

/** Series of a name of a facet; `index` is its position in the page's list of names. */
export function facetSeries(facet: ColorFacet, name: string, index: number): number {
  if (facet === "axis") return index;
  if (facet === "phase") return PHASES.includes(name) ? PHASES.indexOf(name) + 3 : -1;
  if (KINDS.includes(name)) return KINDS.indexOf(name);
  return RARE_KINDS.includes(name) ? 6 + (RARE_KINDS.indexOf(name) % 2) : -1;
}

export function facetColor(facet: ColorFacet, name: string, index: number): string {
  return seriesColor(facetSeries(facet, name, index));
}

/** Colour from low (0) to high (1) in one hue, distinguishable by lightness alone. */
export function heatColor(share: number): string {
  const percent = Math.round(100 * Math.min(Math.max(share, 0), 1));
  return `color-mix(in oklab, var(--heat-high) ${percent}%, var(--heat-low))`;
}

const HOT_SHARE = 0.68; // above this the background is strong

/** Colour of a text on the heat colour of a share, which it contrasts with. */
export function heatTextColor(share: number): string {
  return share > HOT_SHARE ? "var(--heat-text)" : "var(--heat-text-low)";
}

/** The current value of a CSS variable, for canvases. */
export function resolveColor(name: string): string {
  // Read, so that its users are drawn again when the theme changes.
  void theme.value;
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** The current colours of all series, for canvases; the last is grey, for series -1. */
export function resolveSeries(): string[] {
  const indices = [...Array.from({ length: NUM_SERIES }, (_, i) => i), -1];
  return indices.map((index) => resolveColor(seriesVariable(index)));
}
