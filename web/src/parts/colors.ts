/** Colours that people who see few of them tell apart, in light and in dark (styles/theme.css has them). */
import { theme } from "../store/theme";

const NUM_SERIES = 8;

/** Colour of the nth thing of a list, for style sheets and SVG. */
export function colorOf(index: number): string {
  return index < 0 ? "var(--series-none)" : `var(--series-${(index % NUM_SERIES) + 1})`;
}

/** From nothing (0) to the most (1) in one hue; lightness alone tells it, so that it prints too. */
export function heatOf(share: number): string {
  const percent = Math.round(100 * Math.min(Math.max(share, 0), 1));
  return `color-mix(in oklab, var(--heat-high) ${percent}%, var(--heat-low))`;
}

/** What a name of the style sheet is now, for canvases, which know no variables. */
export function resolveColor(name: string): string {
  // Read so that whoever draws by it draws again when the theme changes.
  void theme.value;
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
