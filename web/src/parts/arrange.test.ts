import { expect, test } from "vitest";
import { arrangeRows, nextSort } from "./arrange";
import { splitMatches } from "./highlight";
import { makeByteTicks, makeScale, makeTicks } from "./scale";
import { scrollTo, windowOf } from "./windowed";

const names = ["layers.10.Attn", "layers.9.attn", "", "layers.9.mlp"];
const sizes = [3, null, 7, 3];
const columns = [
  { id: "name", isText: true, value: (row: number) => names[row]! },
  { id: "size", value: (row: number) => sizes[row]! },
];
const wanted = { numRows: 4, columns, sort: null, words: [] };

test("all words must be there, in whichever case", () => {
  expect(arrangeRows({ ...wanted, words: ["attn", "9"] })).toEqual([1]);
  expect(arrangeRows({ ...wanted, words: ["attn"] })).toEqual([0, 1]);
});

test("numbers within names sort as numbers, and what has no value comes last either way", () => {
  const sort = { column: "name", isDescending: false };
  expect(arrangeRows({ ...wanted, sort })).toEqual([1, 3, 0, 2]);
  const sizesDown = { column: "size", isDescending: true };
  expect(arrangeRows({ ...wanted, sort: sizesDown })).toEqual([2, 0, 3, 1]);
  expect(arrangeRows({ ...wanted, sort: { ...sizesDown, isDescending: false } })).toEqual([
    0, 3, 2, 1,
  ]);
});

test("a view's own filter holds besides the search", () => {
  expect(arrangeRows({ ...wanted, words: ["layers"], isShown: (row) => row !== 0 })).toEqual([
    1, 3,
  ]);
});

test("clicks on a head go from the most to the least and back to the first order", () => {
  const once = nextSort(null, columns[1]!, null);
  const twice = nextSort(once, columns[1]!, null);
  expect([once, twice, nextSort(twice, columns[1]!, null)]).toEqual([
    { column: "size", isDescending: true },
    { column: "size", isDescending: false },
    null,
  ]);
  expect(nextSort(once, columns[0]!, null)).toEqual({ column: "name", isDescending: false });
});

test("a window has the rows in sight and some around them, and never more than there are", () => {
  expect(windowOf(0, 300, 30, 20_000)).toEqual({ first: 0, end: 18 });
  expect(windowOf(30_000, 300, 30, 20_000)).toEqual({ first: 992, end: 1018 });
  expect(windowOf(0, 300, 30, 3)).toEqual({ first: 0, end: 3 });
  // Rows that were filtered away while one was far down
  expect(windowOf(30_000, 300, 30, 0)).toEqual({ first: 0, end: 0 });
});

test("rows come into sight with the least movement", () => {
  expect([
    scrollTo(5, 300, 300, 30),
    scrollTo(12, 300, 300, 30),
    scrollTo(30, 300, 300, 30),
  ]).toEqual([150, 300, 630]);
});

test("matches are marked whatever signs are in them", () => {
  expect(splitMatches("a.b(c) a+b", ["b(", "a+"])).toEqual(["a.", "b(", "c) ", "a+", "b"]);
});

test("ticks are round, also for bytes", () => {
  expect(makeTicks(23)).toEqual([0, 5, 10, 15, 20]);
  expect(makeByteTicks(21.4 * 2 ** 30)).toEqual([0, 8, 16].map((one) => one * 2 ** 30));
  expect(makeByteTicks(1)).toContain(0);
});

test("scales go there and back, and a range of nothing has a place", () => {
  const scale = makeScale([10, 20], [0, 100]);
  expect([scale(15), scale.invert(50), makeScale([3, 3], [7, 9])(3)]).toEqual([50, 15, 7]);
});
