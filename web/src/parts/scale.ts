/** Linear scales from values to pixels, and ticks of axes. */

export interface Scale {
  (value: number): number;
  readonly invert: (position: number) => number;
}

/** Linear map from one range to another; an empty range maps to the start. */
export function makeScale(
  [low, high]: readonly [number, number],
  [start, end]: readonly [number, number],
): Scale {
  const factor = high === low ? 0 : (end - start) / (high - low);
  const scale = (value: number): number => start + (value - low) * factor;
  return Object.assign(scale, {
    invert: (position: number): number => (factor ? low + (position - start) / factor : low),
  });
}

/** About `count` round values from 0 to `high`: 1, 2 and 5 times powers of ten. */
export function makeTicks(high: number, count = 5): number[] {
  if (high <= 0) return [0];
  const rough = high / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((factor) => factor >= rough)!;
  return listMultiples(step, high);
}

/** The same for bytes, in powers of two. */
export function makeByteTicks(high: number, count = 5): number[] {
  if (high <= 0) return [0];
  const unit = 1024 ** Math.floor(Math.log2(Math.max(high, 1)) / 10);
  const rough = Math.max(high / count / unit, 1 / 1024);
  const step = 2 ** Math.ceil(Math.log2(rough)) * unit;
  return listMultiples(step, high);
}

function listMultiples(step: number, high: number): number[] {
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, i) => i * step);
}
