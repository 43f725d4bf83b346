/** The part of a rank's memory that is selected, over the step. */
import { computed } from "@preact/signals";
import type { Allocations, MemoryCurve } from "../../page";
import { isInSelection } from "../../store/modules";
import { page } from "../../store/page";
import {
  type Facet,
  isRankSelected,
  isSourceSelected,
  selectedFacetName,
  selectedFacets,
} from "../../store/selection";

/** The curve of the selected rank, else of the ranks that need most memory. */
export const shownCurve = computed<MemoryCurve | null>(() => {
  const curves = page.value.memory;
  return curves.find(({ ranks }) => isRankSelected(ranks)) ?? curves[0] ?? null;
});

const OF_ALLOCATIONS: readonly Facet[] = ["module", "line", "phase"];

/** What a curve can be filtered by. */
export function listCurveFacets({ allocations }: MemoryCurve): readonly Facet[] {
  return allocations ? [...OF_ALLOCATIONS, "rank"] : ["rank"];
}

/** Whether a row is selected: by its module, by its line, and by the phase that allocated it. */
export function makeAllocationFilter(table: Allocations): (row: number) => boolean {
  const name = selectedFacetName("phase");
  const phase = name === null ? -1 : table.phases.indexOf(name);
  return (row) =>
    isInSelection(table.module[row]!) &&
    isSourceSelected(table.line[row]!) &&
    (name === null || table.phase[row] === phase);
}

/** Memory that is selected, at the samples of the curve; null if all of it is. */
export function selectCurve(curve: MemoryCurve): MemoryCurve | null {
  const { allocations } = curve;
  if (!allocations || !selectedFacets.value.some((facet) => OF_ALLOCATIONS.includes(facet))) {
    return null;
  }
  const isSelected = makeAllocationFilter(allocations);
  const columns = curve.kinds.map(() => new Array<number>(curve.order.length).fill(0));
  allocations.start.forEach((start, row) => {
    if (!isSelected(row)) return;
    const column = columns[allocations.kind[row]!]!;
    const numBytes = allocations.num_bytes[row]!;
    // Changes, which are summed below.
    const [first, end] = [start, allocations.end[row]!].map((at) => findFrom(curve.order, at));
    if (first! < column.length) column[first!]! += numBytes;
    if (end! < column.length) column[end!]! -= numBytes;
  });
  for (const column of columns) {
    for (let at = 1; at < column.length; at++) column[at]! += column[at - 1]!;
  }
  const totals = curve.order.map((_, at) => columns.reduce((sum, column) => sum + column[at]!, 0));
  const peakBytes = Math.max(0, ...totals);
  return {
    ...curve,
    num_bytes: columns,
    peak: Math.max(totals.indexOf(peakBytes), 0),
    peak_bytes: peakBytes,
  };
}

/** Position of the first sample at or after an event. */
function findFrom(order: readonly number[], event: number): number {
  let [low, high] = [0, order.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (order[middle]! < event) low = middle + 1;
    else high = middle;
  }
  return low;
}
