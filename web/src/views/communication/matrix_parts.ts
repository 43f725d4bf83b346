/** What is selected of the bytes between ranks. */
import type { Matrix, MatrixParts } from "../../page";
import { type Facet, makeRowFilter, selectedFacets, selection } from "../../store/selection";

/** The facet of each column of the parts. */
const FACET_OF: Readonly<Record<string, Facet>> = {
  axis: "axis",
  kind: "kind",
  phase: "phase",
  owner: "module",
  cause: "cause",
  source: "line",
  dtype: "dtype",
  step: "step",
};

/** Facets that the matrix can be filtered by: those that its parts distinguish, and the sender. */
export function listMatrixFacets({ parts }: Matrix): Facet[] {
  return parts ? [...listPartFacets(parts), "rank"] : ["rank"];
}

function listPartFacets({ merged }: MatrixParts): Facet[] {
  return Object.keys(FACET_OF).flatMap((name) => (merged.includes(name) ? [] : [FACET_OF[name]!]));
}

/** The matrix of what is selected, without pairs of ranks between which nothing of it is sent. */
export function selectMatrix(matrix: Matrix): Matrix {
  if (!selectedFacets.value.some((facet) => listMatrixFacets(matrix).includes(facet))) {
    return matrix;
  }
  const { ranks, sender, receiver } = matrix;
  const sums = sumPairs(matrix);
  const { rank } = selection.value;
  const pairs = sums.flatMap((numBytes, pair) =>
    numBytes > 0 && (rank < 0 || ranks[sender[pair]!] === rank) ? [pair] : [],
  );
  return {
    ...matrix,
    sender: pairs.map((pair) => sender[pair]!),
    receiver: pairs.map((pair) => receiver[pair]!),
    num_bytes: pairs.map((pair) => sums[pair]!),
  };
}

/** Bytes of each pair, by all facets but the sender. */
function sumPairs({ parts, num_bytes: all }: Matrix): readonly number[] {
  if (!parts) return all;
  const ignored = Object.values(FACET_OF).filter((facet) => !listPartFacets(parts).includes(facet));
  const isSelected = makeRowFilter(parts, ignored);
  const sums = new Array<number>(all.length).fill(0);
  parts.pair.forEach((pair, row) => {
    if (isSelected(row)) sums[pair]! += parts.num_bytes[row]!;
  });
  return sums;
}
