/** Filters of the parameter table, and sums of what is selected. */
import type { Parameters } from "../../page";
import { firstRank, includesRank } from "../../store/ranks";

export interface Filter {
  readonly id: string; // in the address (`show=cut`), so do not rename it: links must stay valid
  readonly title: string;
  readonly hint: string;
  readonly matches: (parameters: Parameters, row: number) => boolean;
}

export const FILTERS: readonly Filter[] = [
  { id: "all", title: "All", hint: "parameters and buffers", matches: () => true },
  { id: "cut", title: "Sharded", hint: "of which a rank holds a part", matches: isSharded },
  {
    id: "whole",
    title: "Not sharded",
    hint: "of which every rank holds all",
    matches: (parameters, row) => !isSharded(parameters, row),
  },
  {
    id: "findings",
    title: "With findings",
    hint: "with findings of the audit",
    matches: ({ flags }, row) => flags[row] !== "",
  },
  {
    id: "trainable",
    title: "Trainable",
    hint: "that have gradients",
    matches: ({ is_trainable }, row) => is_trainable[row]!,
  },
  {
    id: "buffers",
    title: "Buffers",
    hint: "that are not parameters",
    matches: ({ is_buffer }, row) => is_buffer[row]!,
  },
];

export function isSharded(parameters: Parameters, row: number): boolean {
  const [global, local] = [parameters.global_bytes[row], parameters.local_bytes[row]];
  if (global == null || local == null) return parameters.shape[row] !== parameters.local_shape[row];
  return local < global;
}

/** Filters that match some but not all parameters, and the first filter, which matches all. */
export function listUsefulFilters(parameters: Parameters): Filter[] {
  const numRows = parameters.name.length;
  return FILTERS.filter(({ matches }, i) => {
    const count = parameters.name.reduce(
      (sum, _, row) => sum + Number(matches(parameters, row)),
      0,
    );
    return i === 0 || (count > 0 && count < numRows);
  });
}

/** `dp: Shard(0)`: a part of a placement. */
const ON_AXIS = /([^\s,():]+): (\w+)/g;

/** Whether any placement names the axis, so that parameters can be filtered by it. */
export function hasAxis({ placement }: Parameters, axis: string): boolean {
  return placement.some((text) => [...text.matchAll(ON_AXIS)].some(([, name]) => name === axis));
}

/** Whether a parameter is divided along the axis: sharded, or a partial sum. */
export function isOnAxis({ placement }: Parameters, row: number, axis: string): boolean {
  return [...placement[row]!.matchAll(ON_AXIS)].some(
    ([, name, kind]) => name === axis && kind !== "Replicate" && kind !== "Invariant",
  );
}

/** The row to draw: the selected row if it is shown, else the first row worth drawing. */
export function chooseRowToDraw(
  numRows: number,
  selectedRow: number,
  isShown: (row: number) => boolean,
  isWorthDrawing: (row: number) => boolean,
): number {
  if (selectedRow >= 0 && selectedRow < numRows && isShown(selectedRow)) return selectedRow;
  let first = -1;
  for (let row = 0; row < numRows; row++) {
    if (!isShown(row)) continue;
    if (isWorthDrawing(row)) return row;
    if (first < 0) first = row;
  }
  return first;
}

/** Bytes of the selected parameters on the rank that holds most of them; null if not recorded. */
export function sumLocalBytes(
  parameters: Parameters,
  isSelected: (row: number) => boolean,
): number | null {
  const rows = parameters.name.map((_, row) => row);
  const chosen = rows.filter((row) => isSelected(row) && !parameters.is_buffer[row]);
  if (chosen.some((row) => parameters.local_bytes[row] == null)) return null;
  const ranks = new Set(chosen.map((row) => Number(firstRank(parameters.ranks[row]!))));
  const sums = [...ranks].map((rank) => {
    const sizes = new Map<string, number>(); // tied parameters count once
    for (const row of chosen) {
      const key = parameters.alias_group[row] || parameters.name[row]!;
      if (!includesRank(parameters.ranks[row]!, rank) || sizes.has(key)) continue;
      sizes.set(key, parameters.local_bytes[row]!);
    }
    return [...sizes.values()].reduce((sum, size) => sum + size, 0);
  });
  return Math.max(0, ...sums);
}
