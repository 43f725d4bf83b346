import { expect, test } from "vitest";
import type { Parameters } from "../../page";
import { fitPicture, sizeOfSide, strengthOf } from "./picture";
import { isSharded, rowToDraw, usableFilters } from "./rows";

const PARAMETERS = {
  name: ["wq", "norm", "mask"],
  global_bytes: [64, 8, 4],
  local_bytes: [16, 8, 4],
  is_trainable: [true, true, false],
  is_buffer: [false, false, true],
  flags: ["", "", ""],
} as unknown as Parameters;

test("filters that keep nothing or everything are not offered", () => {
  const filters = usableFilters(PARAMETERS);
  expect(filters.map(({ id }) => id)).toEqual(["all", "cut", "whole", "trainable", "buffers"]);
  const kept = (id: string) =>
    [0, 1, 2].filter((row) => filters.find((one) => one.id === id)!.isOf(PARAMETERS, row));
  expect([kept("cut"), kept("whole"), kept("buffers")]).toEqual([[0], [1, 2], [2]]);
});

test("parameters whose bytes were not recorded are told apart by their shapes", () => {
  const unsized = {
    ...PARAMETERS,
    shape: ["8 × 2", "2", "1"],
    local_shape: ["2 × 2", "2", "1"],
    global_bytes: [null, null, null],
    local_bytes: [null, null, null],
  };
  expect([0, 1, 2].map((row) => isSharded(unsized, row))).toEqual([true, false, false]);
});

test("what was chosen is drawn while it is shown, else the first that has pieces", () => {
  const isCut = (row: number): boolean => row >= 2;
  expect(rowToDraw(5, 1, () => true, isCut)).toBe(1);
  expect(rowToDraw(5, 1, (row) => row !== 1, isCut)).toBe(2);
  expect(rowToDraw(5, -1, (row) => row < 2, isCut)).toBe(0);
  expect(rowToDraw(5, -1, () => false, isCut)).toBe(-1);
});

test("a picture is true to its tensor's shape, as far as it fits", () => {
  const room = { width: 400, height: 200 };
  expect(fitPicture("dim 1: 4096", "dim 0: 4096", room)).toEqual({ width: 200, height: 200 });
  expect(fitPicture("dim 1: 1", "dim 0: 128256", room)).toEqual({ width: 140, height: 200 });
  expect(fitPicture("dim 0: 4096", "", room)).toEqual({ width: 400, height: 80 });
  expect(sizeOfSide("")).toBe(0);
});

test("pieces with the same colour differ in strength", () => {
  expect(new Set([0, 8, 16].map(strengthOf)).size).toBe(3);
});
