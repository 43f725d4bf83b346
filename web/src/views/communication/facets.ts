/** Which collectives are looked at: an axis, a kind, a phase, each of which may be left open. */
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

export function isOpen({ axis, kind, phase }: Facets): boolean {
  return axis < 0 && kind < 0 && phase < 0;
}

export function isOfFacets(one: Facets, { axis, kind, phase }: Facets): boolean {
  return (
    (axis < 0 || one.axis === axis) &&
    (kind < 0 || one.kind === kind) &&
    (phase < 0 || one.phase === phase)
  );
}

/** One for each call: whether it is one of those that are looked at. */
export function markCalls({ calls }: Communication, facets: Facets): Uint8Array {
  const { axis, kind, phase } = calls;
  return Uint8Array.from(axis, (_, i) =>
    Number(isOfFacets({ axis: axis[i]!, kind: kind[i]!, phase: phase[i]! }, facets)),
  );
}

/** Which reasons led to any call that is looked at; a reason knows no phase of its own. */
export function markReasons(communication: Communication, facets: Facets): boolean[] {
  const { calls, kinds, axes, reasons } = communication;
  if (isOpen(facets)) return reasons.map(() => true);
  const marks = markCalls(communication, facets);
  const found = new Set<string>();
  marks.forEach((isMarked, i) => {
    if (!isMarked) return;
    found.add(`${calls.cause[i]} ${kinds[calls.kind[i]!]}[${axes[calls.axis[i]!]}]`);
  });
  return reasons.map(({ words, what }) => found.has(`${words} ${what}`));
}

export type Measure = "bytes" | "counts";

export interface Cell {
  readonly axis: number;
  readonly kind: number;
  readonly value: number;
  readonly phases: readonly number[]; // how much of it is of each phase
  readonly numSums: number; // that were added up
}

/** Collectives of each kind on each axis; -1 stands for all of them. */
export function fillCell(
  { sums, phases }: Communication,
  { axis, kind, phase }: Facets,
  measure: Measure,
): Cell {
  const found = sums.filter((one) => isOfFacets(one, { axis, kind, phase }));
  const byPhase = phases.map(() => 0);
  for (const one of found) {
    byPhase[one.phase]! += measure === "bytes" ? one.wire_bytes : one.count;
  }
  const value = byPhase.reduce((a, b) => a + b, 0);
  return { axis, kind, value, phases: byPhase, numSums: found.length };
}

/** Positions that any sum has, in the order of their list. */
export function usedPositions(
  { sums }: Communication,
  name: "axis" | "kind" | "phase",
): readonly number[] {
  return [...new Set(sums.map((one) => one[name]))].sort((a, b) => a - b);
}
