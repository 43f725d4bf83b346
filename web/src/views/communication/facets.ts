/** Totals of the selected collectives by mesh axis, kind and phase. */
import type { Traffic } from "../../page";
import { selection } from "../../store/selection";
import { sumRows } from "../../store/traffic";

export type Measure = "bytes" | "counts";

/** What the rank that sends most of it sends along an axis, of a kind, in a phase. */
export interface FacetSum {
  readonly axis: number;
  readonly kind: number;
  readonly phase: number;
  readonly count: number;
  readonly wire_bytes: number;
}

/** Sums of what is selected, for all axes and kinds, so that another one can be selected. */
export function sumFacets(): FacetSum[] {
  return sumRows(["axis", "kind", "phase"], ["axis", "kind"]).map(
    ({ values: [axis, kind, phase], count, wire_bytes }) => ({
      axis: axis!,
      kind: kind!,
      phase: phase!,
      count,
      wire_bytes,
    }),
  );
}

export interface Cell {
  readonly axis: number;
  readonly kind: number;
  readonly value: number;
  readonly phases: readonly number[]; // the part of each phase
  readonly numSums: number; // that `value` is the sum of
}

/** Collectives of a kind on an axis; -1 stands for those that are selected, or for all of them. */
export function fillCell(
  sums: readonly FacetSum[],
  axis: number,
  kind: number,
  measure: Measure,
): Cell {
  const isMatch = (value: number, ofCell: number, ofSelection: number): boolean => {
    const wanted = ofCell >= 0 ? ofCell : ofSelection;
    return wanted < 0 || value === wanted;
  };
  const facets = selection.value;
  const matching = sums.filter(
    (sum) => isMatch(sum.axis, axis, facets.axis) && isMatch(sum.kind, kind, facets.kind),
  );
  const phases: number[] = [];
  for (const sum of matching) {
    const figure = measure === "bytes" ? sum.wire_bytes : sum.count;
    phases[sum.phase] = (phases[sum.phase] ?? 0) + figure;
  }
  const byPhase = Array.from(phases, (figure) => figure ?? 0);
  const value = byPhase.reduce((a, b) => a + b, 0);
  return { axis, kind, value, phases: byPhase, numSums: matching.length };
}

/** Positions that occur in any row, in the order of the list of names. */
export function usedPositions(
  traffic: Traffic,
  name: "axis" | "kind" | "phase",
): readonly number[] {
  return [...new Set(traffic[name])].sort((a, b) => a - b);
}
