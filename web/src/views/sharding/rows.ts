/** Which parameters are asked for. */
import type { Parameters } from "../../page";

export interface Filter {
  readonly id: string;
  readonly title: string;
  readonly hint: string;
  readonly isOf: (parameters: Parameters, row: number) => boolean;
}

export const FILTERS: readonly Filter[] = [
  { id: "all", title: "All", hint: "parameters and buffers", isOf: () => true },
  { id: "cut", title: "Sharded", hint: "of which a rank holds a part", isOf: isSharded },
  {
    id: "whole",
    title: "Not sharded",
    hint: "of which every rank holds all",
    isOf: (parameters, row) => !isSharded(parameters, row),
  },
  {
    id: "findings",
    title: "With findings",
    hint: "with findings of the audit",
    isOf: ({ flags }, row) => flags[row] !== "",
  },
  {
    id: "trainable",
    title: "Trainable",
    hint: "that have gradients",
    isOf: ({ is_trainable }, row) => is_trainable[row]!,
  },
  {
    id: "buffers",
    title: "Buffers",
    hint: "that are not parameters",
    isOf: ({ is_buffer }, row) => is_buffer[row]!,
  },
];

export function isSharded(parameters: Parameters, row: number): boolean {
  const [whole, local] = [parameters.global_bytes[row], parameters.local_bytes[row]];
  if (whole == null || local == null) return parameters.shape[row] !== parameters.local_shape[row];
  return local < whole;
}

/** Those that any parameter is of; one that has them all says nothing, but for the first. */
export function usableFilters(parameters: Parameters): Filter[] {
  const num = parameters.name.length;
  return FILTERS.filter(({ isOf }, i) => {
    const count = parameters.name.reduce((sum, _, row) => sum + Number(isOf(parameters, row)), 0);
    return i === 0 || (count > 0 && count < num);
  });
}

/** The row to draw: the one that was chosen if it is shown, else the first that is. */
export function rowToDraw(
  num: number,
  chosen: number,
  isShown: (row: number) => boolean,
  isWorthDrawing: (row: number) => boolean,
): number {
  if (chosen >= 0 && chosen < num && isShown(chosen)) return chosen;
  let first = -1;
  for (let row = 0; row < num; row++) {
    if (!isShown(row)) continue;
    if (isWorthDrawing(row)) return row;
    if (first < 0) first = row;
  }
  return first;
}
