/** Bytes or counts of collectives by module, of its busiest rank, in parts by axis, kind or phase. */
import type { Modules, Traffic } from "../../page";
import type { ColorFacet } from "../../parts/colors";

export interface TrafficParts {
  readonly totals: Float64Array; // by module, including children
  readonly parts: readonly Float64Array[]; // by position in the facet's list of names
}

interface Request {
  readonly figure: "wire_bytes" | "count";
  readonly facet: ColorFacet;
  readonly numParts: number;
  readonly isIncluded: (row: number) => boolean; // the filter
}

/** Sums subtrees on each rank; each module has the figures of the rank that has most for it. */
export function splitTraffic(
  { parent }: Pick<Modules, "parent">,
  traffic: Traffic,
  { figure, facet, numParts, isIncluded }: Request,
): TrafficParts {
  const totals = new Float64Array(parent.length);
  const parts = Array.from({ length: numParts }, () => new Float64Array(parent.length));
  for (const rows of groupByRanks(traffic, isIncluded)) {
    const rankParts = parts.map(() => new Float64Array(parent.length));
    for (const row of rows) {
      const owner = traffic.owner[row]!;
      const part = rankParts[traffic[facet][row]!];
      if (part && owner >= 0) part[owner]! += traffic[figure][row]!;
    }
    for (let i = parent.length - 1; i >= 0; i--) {
      let total = 0;
      for (const part of rankParts) {
        total += part[i]!;
        if (parent[i]! >= 0) part[parent[i]!]! += part[i]!;
      }
      if (total <= totals[i]!) continue;
      totals[i] = total;
      parts.forEach((part, at) => {
        part[i] = rankParts[at]![i]!;
      });
    }
  }
  return { totals, parts };
}

function groupByRanks(
  { rank_set: ranks }: Traffic,
  isIncluded: (row: number) => boolean,
): Iterable<number[]> {
  const rowsByRanks = new Map<number, number[]>();
  for (let row = 0; row < ranks.length; row++) {
    if (!isIncluded(row)) continue;
    const rows = rowsByRanks.get(ranks[row]!);
    if (rows) rows.push(row);
    else rowsByRanks.set(ranks[row]!, [row]);
  }
  return rowsByRanks.values();
}
