/** The filter of collectives: by axis, kind and phase. */
import type { Communication } from "../../page";
import { param } from "../../store/route";

/** Positions in the lists of names; -1 is all of them. */
export interface Facets {
  readonly axis: number;
  readonly kind: number;
  readonly phase: number;
}

export function readFacets({ axes, kinds, phases }: Communication): Facets {
  return {
    axis: axes.indexOf(param("axis") ?? ""),
    kind: kinds.indexOf(param("kind") ?? ""),
    phase: phases.indexOf(param("phase") ?? ""),
  };
}

export function isUnfiltered({ axis, kind, phase }: Facets): boolean {
  return axis < 0 && kind < 0 && phase < 0;
}

export function matchesFacets(item: Facets, { axis, kind, phase }: Facets): boolean {
  return (
    (axis < 0 || item.axis === axis) &&
    (kind < 0 || item.kind === kind) &&
    (phase < 0 || item.phase === phase)
  );
}

/** For each call, 1 if it matches the filter, else 0. */
export function matchCalls({ calls }: Communication, facets: Facets): Uint8Array {
  const { axis, kind, phase } = calls;
  return Uint8Array.from(axis, (_, i) =>
    Number(matchesFacets({ axis: axis[i]!, kind: kind[i]!, phase: phase[i]! }, facets)),
  );
}

/** For each cause, whether it led to a call that matches the filter. */
export function matchCauses(communication: Communication, facets: Facets): boolean[] {
  const { calls, kinds, axes, cause_rows } = communication;
  if (isUnfiltered(facets)) return cause_rows.map(() => true);
  const matches = matchCalls(communication, facets);
  const shownCauses = new Set<string>();
  matches.forEach((isMatch, i) => {
    if (!isMatch) return;
    shownCauses.add(`${calls.cause[i]} ${kinds[calls.kind[i]!]}[${axes[calls.axis[i]!]}]`);
  });
  return cause_rows.map(({ cause, what }) => shownCauses.has(`${cause} ${what}`));
}

export type Measure = "bytes" | "counts";

export interface Cell {
  readonly axis: number;
  readonly kind: number;
  readonly value: number;
  readonly phases: readonly number[]; // the part of each phase
  readonly numSums: number; // that `value` is the sum of
}

/** Collectives of each kind on each axis; -1 stands for all of them. */
export function fillCell(
  { sums, phases }: Communication,
  { axis, kind, phase }: Facets,
  measure: Measure,
): Cell {
  const matching = sums.filter((sum) => matchesFacets(sum, { axis, kind, phase }));
  const byPhase = phases.map(() => 0);
  for (const sum of matching) {
    byPhase[sum.phase]! += measure === "bytes" ? sum.wire_bytes : sum.count;
  }
  const value = byPhase.reduce((a, b) => a + b, 0);
  return { axis, kind, value, phases: byPhase, numSums: matching.length };
}

/** Positions that occur in the sums, in the order of the list of names. */
export function usedPositions(
  { sums }: Communication,
  name: "axis" | "kind" | "phase",
): readonly number[] {
  return [...new Set(sums.map((sum) => sum[name]))].sort((a, b) => a - b);
}
