/** Bytes or counts of collectives by module, of its busiest rank, in parts by axis, kind or phase. */
import type { Communication, Modules } from "../../page";
import type { ColorFacet } from "../../parts/colors";

/** Collectives in columns; `ranks` tells apart ranks that issued different collectives. */
export interface TrafficColumns {
  readonly ranks: ArrayLike<number>;
  readonly owner: ArrayLike<number>;
  readonly axis: ArrayLike<number>;
  readonly kind: ArrayLike<number>;
  readonly phase: ArrayLike<number>;
  readonly size: ArrayLike<number>;
}

export interface ModuleTraffic {
  readonly totals: Float64Array; // by module, including children
  readonly parts: readonly Float64Array[]; // by position in the facet's list of names
}

interface Request {
  readonly facet: ColorFacet;
  readonly numParts: number;
  readonly isIncluded: (row: number) => boolean; // the filter
}

/** Sums subtrees on each rank; each module has the figures of the rank that has most for it. */
export function sumModuleTraffic(
  { parent }: Pick<Modules, "parent">,
  columns: TrafficColumns,
  { facet, numParts, isIncluded }: Request,
): ModuleTraffic {
  const totals = new Float64Array(parent.length);
  const parts = Array.from({ length: numParts }, () => new Float64Array(parent.length));
  for (const rows of groupByRanks(columns, isIncluded)) {
    const rankParts = parts.map(() => new Float64Array(parent.length));
    for (const row of rows) {
      const owner = columns.owner[row]!;
      const part = rankParts[columns[facet][row]!];
      if (part && owner >= 0) part[owner]! += columns.size[row]!;
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
  { ranks }: TrafficColumns,
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

/** The collectives of one rank of each set of identical ranks. */
export function listTraffic(
  { calls, ranks }: Communication,
  figure: "wire_bytes" | "count",
): TrafficColumns {
  const examples = new Set(ranks.map(({ example }) => example));
  const rows = calls.rank.flatMap((rank, row) => (examples.has(rank) ? [row] : []));
  const pick = (column: readonly number[]): number[] => rows.map((row) => column[row]!);
  return {
    ranks: pick(calls.rank),
    owner: pick(calls.owner),
    axis: pick(calls.axis),
    kind: pick(calls.kind),
    phase: pick(calls.phase),
    size: figure === "count" ? rows.map(() => 1) : pick(calls.wire_bytes),
  };
}
