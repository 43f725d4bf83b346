/** Values of a stacked area chart: each kind on top of the kinds before it. */
import type { MemoryCurve } from "../../page";

/** For each kind and sample, the sum of this kind and all kinds before it. */
export function stackKinds(curve: MemoryCurve): number[][] {
  const below = new Array<number>(curve.order.length).fill(0);
  return curve.num_bytes.map((column) => {
    column.forEach((value, sample) => {
      below[sample] = below[sample]! + value;
    });
    return [...below];
  });
}

/** Bytes of all kinds at a sample. */
export function sumAt(curve: MemoryCurve, sample: number): number {
  return curve.num_bytes.reduce((sum, column) => sum + (column[sample] ?? 0), 0);
}

/** Position of the last sample at or before a moment. */
export function findSample(order: readonly number[], moment: number): number {
  let low = 0;
  let high = order.length - 1;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (order[middle]! <= moment) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Positions of kinds that are not always zero. */
export function usedKinds(curve: MemoryCurve): number[] {
  return curve.kinds.map((_, kind) => kind).filter((kind) => curve.num_bytes[kind]!.some(Boolean));
}

export interface KindSum {
  readonly kind: number;
  readonly numBytes: number;
}

/** Bytes of each kind at the peak, the most first. */
export function sumKinds(curve: MemoryCurve): KindSum[] {
  return usedKinds(curve)
    .map((kind) => ({ kind, numBytes: curve.num_bytes[kind]![curve.peak] ?? 0 }))
    .sort((a, b) => b.numBytes - a.numBytes);
}
