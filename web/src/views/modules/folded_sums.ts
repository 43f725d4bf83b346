/** Figures of what is shown: a module that represents folded layers has the sum of them all. */
import type { Modules } from "../../page";

/**
 * Sums of a column by the modules that are shown; `shown` has for each module its representative.
 * Modules that another one represents have their own figure, which a search may show.
 */
export function sumShown(column: ArrayLike<number>, shown: Int32Array): Float64Array {
  const sums = new Float64Array(shown.length);
  shown.forEach((representative, i) => {
    sums[representative]! += column[i] ?? 0;
    if (representative !== i) sums[i] = column[i] ?? 0;
  });
  return sums;
}

/** How many modules each shown module represents, itself included. */
export function countRepresented(shown: Int32Array): Float64Array {
  return sumShown(new Uint8Array(shown.length).fill(1), shown);
}

export interface Spread {
  readonly low: number;
  readonly high: number;
}

/** Smallest and largest figure of the modules that a shown module represents. */
export function findSpread(
  column: (position: number) => number,
  shown: Int32Array,
  position: number,
): Spread {
  let low = Number.POSITIVE_INFINITY;
  let high = Number.NEGATIVE_INFINITY;
  shown.forEach((representative, i) => {
    if (representative !== position) return;
    low = Math.min(low, column(i));
    high = Math.max(high, column(i));
  });
  return { low, high };
}

/** `38.0 MiB each`, `36.0 – 38.0 MiB each`. */
export function formatEach({ low, high }: Spread, format: (value: number) => string): string {
  const [least, most] = [format(low), format(high)];
  return least === most ? `${most} each` : `${least} – ${most} each`;
}

/** Name of all modules that a shown module represents: `layers.{0…31}.attention`. */
export function nameRepresented(modules: Modules, shown: Int32Array, position: number): string {
  return joinRepresented(modules, shown, position, (low, high) => `{${low}…${high}}`);
}

/** The module pattern that matches all modules that a shown module represents. */
export function patternOf(modules: Modules, shown: Int32Array, position: number): string {
  return joinRepresented(modules, shown, position, (low, high) => `[${low}-${high}]`);
}

function joinRepresented(
  modules: Modules,
  shown: Int32Array,
  position: number,
  formatRun: (low: number, high: number) => string,
): string {
  const paths = modules.path.filter((_, i) => shown[i] === position).map((path) => path.split("."));
  const [first = []] = paths;
  return first
    .map((part, i) => {
      const parts = new Set(paths.map((path) => path[i]));
      if (parts.size === 1) return part;
      const numbers = [...parts].map(Number).sort((a, b) => a - b);
      const isRun = numbers.at(-1)! - numbers[0]! === numbers.length - 1;
      return isRun ? formatRun(numbers[0]!, numbers.at(-1)!) : "*";
    })
    .join(".");
}
