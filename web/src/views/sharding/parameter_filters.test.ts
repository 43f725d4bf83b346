import { expect, test } from "vitest";
import type { Parameters } from "../../page";
import { fitPicture, parseSideSize, shardOpacity } from "./drawing_size";
import { chooseRowToDraw, isSharded, listUsefulFilters, sumLocalBytes } from "./parameter_filters";

const PARAMETERS = {
  name: ["wq", "norm", "mask"],
  global_bytes: [64, 8, 4],
  local_bytes: [16, 8, 4],
  is_trainable: [true, true, false],
  is_buffer: [false, false, true],
  flags: ["", "", ""],
} as unknown as Parameters;

test("filters that match no parameter or all of them are not offered", () => {
  const filters = listUsefulFilters(PARAMETERS);
  expect(filters.map(({ id }) => id)).toEqual(["all", "cut", "whole", "trainable", "buffers"]);
  const rowsOf = (id: string) =>
    [0, 1, 2].filter((row) => filters.find((filter) => filter.id === id)!.matches(PARAMETERS, row));
  expect([rowsOf("cut"), rowsOf("whole"), rowsOf("buffers")]).toEqual([[0], [1, 2], [2]]);
});

test("without recorded bytes a parameter is sharded if its local shape differs", () => {
  const unsized = {
    ...PARAMETERS,
    shape: ["8 × 2", "2", "1"],
    local_shape: ["2 × 2", "2", "1"],
    global_bytes: [null, null, null],
    local_bytes: [null, null, null],
  };
  expect([0, 1, 2].map((row) => isSharded(unsized, row))).toEqual([true, false, false]);
});

test("the selected row is drawn while it is shown, else the first row that has shards", () => {
  const isWorthDrawing = (row: number): boolean => row >= 2;
  expect(chooseRowToDraw(5, 1, () => true, isWorthDrawing)).toBe(1);
  expect(chooseRowToDraw(5, 1, (row) => row !== 1, isWorthDrawing)).toBe(2);
  expect(chooseRowToDraw(5, -1, (row) => row < 2, isWorthDrawing)).toBe(0);
  expect(chooseRowToDraw(5, -1, () => false, isWorthDrawing)).toBe(-1);
});

test("a drawing has its tensor's aspect ratio, within limits", () => {
  const room = { width: 400, height: 200 };
  expect(fitPicture("dim 1: 4096", "dim 0: 4096", room)).toEqual({ width: 200, height: 200 });
  expect(fitPicture("dim 1: 1", "dim 0: 128256", room)).toEqual({ width: 140, height: 200 });
  expect(fitPicture("dim 0: 4096", "", room)).toEqual({ width: 400, height: 80 });
  expect(parseSideSize("")).toBe(0);
});

test("shards with the same colour differ in opacity", () => {
  expect(new Set([0, 8, 16].map(shardOpacity)).size).toBe(3);
});

test("bytes of selected parameters are of the rank that holds most, tied ones once", () => {
  const parameters = {
    name: ["embed", "head", "a", "b", "mask"],
    alias_group: ["tie", "tie", "", "", ""],
    ranks: ["0-3", "0-3", "0-1", "2-3", "0-3"],
    local_bytes: [10, 10, 4, 7, 99],
    is_buffer: [false, false, false, false, true],
  } as unknown as Parameters;
  expect(sumLocalBytes(parameters, () => true)).toBe(17);
  expect(sumLocalBytes(parameters, (row) => row !== 3)).toBe(14);
  expect(sumLocalBytes(parameters, () => false)).toBe(0);
  const unsized = { ...parameters, local_bytes: [10, 10, null, 7, 99] };
  expect(sumLocalBytes(unsized, () => true)).toBeNull();
});
