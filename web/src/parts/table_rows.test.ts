import { expect, test } from "vitest";
import { splitMatches } from "../store/search";
import { makeByteTicks, makeScale, makeTicks } from "./scale";
import { filterAndSortRows, nextSort } from "./table_rows";
import { findVisibleRows, scrollTopToShow } from "./virtual_rows";

const names = ["layers.10.Attn", "layers.9.attn", "", "layers.9.mlp"];
const sizes = [3, null, 7, 3];
const columns = [
  { id: "name", isText: true, value: (row: number) => names[row]! },
  { id: "size", value: (row: number) => sizes[row]! },
];
const query = { numRows: 4, columns, sort: null, words: [] };

test("all words must occur, in any case", () => {
  expect(filterAndSortRows({ ...query, words: ["attn", "9"] })).toEqual([1]);
  expect(filterAndSortRows({ ...query, words: ["attn"] })).toEqual([0, 1]);
});

test("numbers within names sort as numbers, and rows without a value come last", () => {
  const sort = { column: "name", isDescending: false };
  expect(filterAndSortRows({ ...query, sort })).toEqual([1, 3, 0, 2]);
  const sizesDown = { column: "size", isDescending: true };
  expect(filterAndSortRows({ ...query, sort: sizesDown })).toEqual([2, 0, 3, 1]);
  expect(filterAndSortRows({ ...query, sort: { ...sizesDown, isDescending: false } })).toEqual([
    0, 3, 2, 1,
  ]);
});

test("a view's own filter applies in addition to the search", () => {
  expect(filterAndSortRows({ ...query, words: ["layers"], isShown: (row) => row !== 0 })).toEqual([
    1, 3,
  ]);
});

test("clicks on a column's head sort descending, then ascending, then restore the order", () => {
  const once = nextSort(null, columns[1]!, null);
  const twice = nextSort(once, columns[1]!, null);
  expect([once, twice, nextSort(twice, columns[1]!, null)]).toEqual([
    { column: "size", isDescending: true },
    { column: "size", isDescending: false },
    null,
  ]);
  expect(nextSort(once, columns[0]!, null)).toEqual({ column: "name", isDescending: false });
});

test("visible rows include some around them, but never more than there are", () => {
  expect(findVisibleRows(0, 300, 30, 20_000)).toEqual({ first: 0, end: 18 });
  expect(findVisibleRows(30_000, 300, 30, 20_000)).toEqual({ first: 992, end: 1018 });
  expect(findVisibleRows(0, 300, 30, 3)).toEqual({ first: 0, end: 3 });
  // All rows were filtered out after scrolling down
  expect(findVisibleRows(30_000, 300, 30, 0)).toEqual({ first: 0, end: 0 });
});

test("a row is made visible with the least scrolling", () => {
  expect([
    scrollTopToShow(5, 300, 300, 30),
    scrollTopToShow(12, 300, 300, 30),
    scrollTopToShow(30, 300, 300, 30),
  ]).toEqual([150, 300, 630]);
});

test("matches are found even if they contain special characters", () => {
  expect(splitMatches("a.b(c) a+b", ["b(", "a+"])).toEqual(["a.", "b(", "c) ", "a+", "b"]);
});

test("ticks are round numbers, also for bytes", () => {
  expect(makeTicks(23)).toEqual([0, 5, 10, 15, 20]);
  expect(makeByteTicks(21.4 * 2 ** 30)).toEqual([0, 8, 16].map((unit) => unit * 2 ** 30));
  expect(makeByteTicks(1)).toContain(0);
});

test("scales can be inverted, and an empty range maps to the start", () => {
  const scale = makeScale([10, 20], [0, 100]);
  expect([scale(15), scale.invert(50), makeScale([3, 3], [7, 9])(3)]).toEqual([50, 15, 7]);
});
