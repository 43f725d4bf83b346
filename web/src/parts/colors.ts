/** Colours that are distinguishable with colour blindness, in light and dark (see styles/theme.css). */
import { theme } from "../store/theme";

const NUM_SERIES = 8;

/** Colour of the nth series, for style sheets and SVG; -1 is grey. */
export function seriesColor(index: number): string {
  return index < 0 ? "var(--series-none)" : `var(--series-${(index % NUM_SERIES) + 1})`;
}

/** Colour from low (0) to high (1) in one hue, distinguishable by lightness alone. */
export function heatColor(share: number): string {
  const percent = Math.round(100 * Math.min(Math.max(share, 0), 1));
  return `color-mix(in oklab, var(--heat-high) ${percent}%, var(--heat-low))`;
}

/** The current value of a CSS variable, for canvases. */
export function resolveColor(name: string): string {
  // Read, so that its users are drawn again when the theme changes.
  void theme.value;
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
