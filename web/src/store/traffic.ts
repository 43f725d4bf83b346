/** Sums of the selected collectives. Figures are of the busiest rank unless a rank is selected. */
import { computed } from "@preact/signals";
import type { Traffic } from "../page";
import { page } from "./page";
import {
  type CallRange,
  type Facet,
  isInRange,
  listedRankOf,
  makeRowFilter,
  selectedRankSet,
  selection,
} from "./selection";

export interface TrafficSum {
  readonly count: number;
  readonly input_bytes: number;
  readonly wire_bytes: number;
}

export const NO_TRAFFIC: TrafficSum = { count: 0, input_bytes: 0, wire_bytes: 0 };

/** Columns that rows can be summed by. */
export type TrafficColumn = Exclude<keyof Traffic, keyof TrafficSum>;

/** Rows with the same values in some columns. */
export interface TrafficGroup extends TrafficSum {
  readonly values: readonly number[]; // in the order of the columns
  readonly rows: readonly number[];
}

const EMPTY: Traffic = {
  rank_set: [],
  axis: [],
  kind: [],
  phase: [],
  owner: [],
  cause: [],
  source: [],
  dtype: [],
  step: [],
  count: [],
  input_bytes: [],
  wire_bytes: [],
};

/** The page's rows, or a row for each call if a range of calls is selected. */
export const trafficRows = computed<Traffic>(() => {
  const communication = page.value.communication;
  if (!communication) return EMPTY;
  const { range } = selection.value;
  return range ? listCallsInRange(range) : communication.traffic;
});

/** A row for each call in the range, of one rank of each set of identical ranks. */
function listCallsInRange(range: CallRange): Traffic {
  const { calls, ranks } = page.value.communication!;
  const rankSets = new Map<number, number>();
  ranks.forEach(({ example }, rankSet) => {
    const isSelectedSet = rankSet === selectedRankSet.value;
    rankSets.set(isSelectedSet ? listedRankOf(selection.value.rank) : example, rankSet);
  });
  const positions = range.along === "time" ? calls.start_ns : calls.order;
  const rows: number[] = [];
  calls.rank.forEach((rank, row) => {
    if (rankSets.has(rank) && isInRange(positions[row], range)) rows.push(row);
  });
  const pick = (column: readonly number[]): number[] => rows.map((row) => column[row]!);
  return {
    rank_set: rows.map((row) => rankSets.get(calls.rank[row]!)!),
    axis: pick(calls.axis),
    kind: pick(calls.kind),
    phase: pick(calls.phase),
    owner: pick(calls.owner),
    cause: pick(calls.cause),
    source: pick(calls.source),
    dtype: pick(calls.dtype),
    step: pick(calls.step),
    count: rows.map(() => 1),
    input_bytes: pick(calls.input_bytes),
    wire_bytes: pick(calls.wire_bytes),
  };
}

/** Whether a row of `trafficRows` is selected, by all facets but those ignored. */
export function makeTrafficFilter(ignored: readonly Facet[] = []): (row: number) => boolean {
  const rows = trafficRows.value;
  const isSelected = makeRowFilter(rows, ignored);
  if (selection.value.rank < 0 || ignored.includes("rank")) return isSelected;
  const rankSet = selectedRankSet.value;
  return (row) => rows.rank_set[row] === rankSet && isSelected(row);
}

export function isRowSelected(row: number): boolean {
  return makeTrafficFilter()(row);
}

/** Sums the selected rows by some columns; rows are not filtered by facets that are ignored. */
export function sumRows(
  by: readonly TrafficColumn[],
  ignored: readonly Facet[] = [],
): TrafficGroup[] {
  return groupRows(trafficRows.value, by, makeTrafficFilter(ignored));
}

/**
 * Groups rows by some columns. The sum of a group is that of the set of identical ranks that sends
 * most in it (of equal ones, that with more collectives). Groups are in the order of their rows.
 */
export function groupRows(
  traffic: Traffic,
  by: readonly TrafficColumn[],
  isIncluded: (row: number) => boolean = () => true,
): TrafficGroup[] {
  const columns = by.map((name) => traffic[name]);
  const groups = new Map<string, { values: number[]; rows: number[] }>();
  traffic.count.forEach((_, row) => {
    if (!isIncluded(row)) return;
    const values = columns.map((column) => column[row]!);
    const key = values.join();
    const group = groups.get(key);
    if (group) group.rows.push(row);
    else groups.set(key, { values, rows: [row] });
  });
  return [...groups.values()].map(({ values, rows }) => ({
    values,
    rows,
    ...findBusiest(sumByRankSet(traffic, rows)),
  }));
}

/** Sums rows for each set of identical ranks. */
export function sumByRankSet(traffic: Traffic, rows: Iterable<number>): Map<number, TrafficSum> {
  const sums = new Map<number, { count: number; input_bytes: number; wire_bytes: number }>();
  for (const row of rows) {
    const rankSet = traffic.rank_set[row]!;
    const sum = sums.get(rankSet) ?? { ...NO_TRAFFIC };
    sum.count += traffic.count[row]!;
    sum.input_bytes += traffic.input_bytes[row]!;
    sum.wire_bytes += traffic.wire_bytes[row]!;
    sums.set(rankSet, sum);
  }
  return sums;
}

/**
 * The set of identical ranks that sends most, or of equal ones that with more collectives; the first
 * if equal, as in Python. -1 if there is none.
 */
export function findBusiestSet(sums: ReadonlyMap<number, TrafficSum>): number {
  let busiest = -1;
  for (const [rankSet, sum] of sums) {
    if (busiest < 0 || compareTraffic(sum, sums.get(busiest)!) > 0) busiest = rankSet;
  }
  return busiest;
}

/** The sum of that set. */
export function findBusiest(sums: ReadonlyMap<number, TrafficSum>): TrafficSum {
  return sums.get(findBusiestSet(sums)) ?? NO_TRAFFIC;
}

export function compareTraffic(a: TrafficSum, b: TrafficSum): number {
  return a.wire_bytes - b.wire_bytes || a.count - b.count;
}

/** What is selected, of the busiest rank. */
export const selectedTraffic = computed<TrafficSum>(() => sumRows([])[0] ?? NO_TRAFFIC);

/** What each set of identical ranks issued in all, whatever is selected. */
const rankSetTotals = computed(() => {
  const traffic = page.value.communication?.traffic ?? EMPTY;
  return sumByRankSet(traffic, traffic.count.keys());
});

/** What the busiest rank issued in all, whatever is selected. */
export const totalTraffic = computed<TrafficSum>(() => findBusiest(rankSetTotals.value));

/** The busiest rank, whatever is selected; -1 if there is none. */
export const busiestRank = computed(() => {
  const ranks = page.value.communication?.ranks ?? [];
  return ranks[findBusiestSet(rankSetTotals.value)]?.example ?? -1;
});

/** Whether figures are of different ranks, so that their sum is an upper bound. */
export const isOfSeveralRanks = computed(
  () => (page.value.communication?.ranks.length ?? 0) > 1 && selection.value.rank < 0,
);

/** Whether the page lists all calls of one rank of each set, which a range selects from. */
export const hasAllCalls = computed(() => {
  const { calls, ranks, traffic } = page.value.communication!;
  const examples = new Set(ranks.map(({ example }) => example));
  const numListed = calls.rank.filter((rank) => examples.has(rank)).length;
  return numListed === traffic.count.reduce((sum, count) => sum + count, 0);
});
