/** From figures to places, and where an axis has its ticks. */

export interface Scale {
  (value: number): number;
  readonly invert: (place: number) => number;
}

/** Straight from one range to another; a range of nothing maps to its start. */
export function makeScale(
  [low, high]: readonly [number, number],
  [start, end]: readonly [number, number],
): Scale {
  const factor = high === low ? 0 : (end - start) / (high - low);
  const scale = (value: number): number => start + (value - low) * factor;
  return Object.assign(scale, {
    invert: (place: number): number => (factor ? low + (place - start) / factor : low),
  });
}

/** About `count` round figures from 0 to `high`: 1, 2 and 5 times powers of ten. */
export function makeTicks(high: number, count = 5): number[] {
  if (high <= 0) return [0];
  const rough = high / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough)!;
  return listMultiples(step, high);
}

/** The same for bytes, which people count by powers of two. */
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
