/** Where the layers of a stacked area run: each on top of the ones before it. */
import type { MemoryCurve } from "../../page";

/** For each kind, the sum of it and all kinds before it at each sample. */
export function stackUp(curve: MemoryCurve): number[][] {
  const below = new Array<number>(curve.order.length).fill(0);
  return curve.num_bytes.map((column) => {
    column.forEach((value, at) => {
      below[at] = below[at]! + value;
    });
    return [...below];
  });
}

/** All that was held at a sample. */
export function totalAt(curve: MemoryCurve, at: number): number {
  return curve.num_bytes.reduce((sum, column) => sum + (column[at] ?? 0), 0);
}

/** The sample that a moment belongs to: the last one at or before it. */
export function sampleAt(order: readonly number[], moment: number): number {
  let low = 0;
  let high = order.length - 1;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (order[middle]! <= moment) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Kinds that hold anything at all, by position. */
export function usedKinds(curve: MemoryCurve): number[] {
  return curve.kinds.map((_, kind) => kind).filter((kind) => curve.num_bytes[kind]!.some(Boolean));
}

export interface KindSum {
  readonly kind: number;
  readonly numBytes: number;
}

/** What each kind held at the peak, the most first. */
export function sumKinds(curve: MemoryCurve): KindSum[] {
  return usedKinds(curve)
    .map((kind) => ({ kind, numBytes: curve.num_bytes[kind]![curve.peak] ?? 0 }))
    .sort((a, b) => b.numBytes - a.numBytes);
}
