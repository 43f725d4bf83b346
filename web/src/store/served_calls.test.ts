import { expect, test } from "vitest";
import type { Calls } from "../page";
import { makePage } from "./empty_page";
import { page } from "./page";
import { navigate } from "./route";
import { findRanges, ServedRows, servedFilters } from "./served_calls";

const CALLS = { rank: [0], order: [0], start_ns: [] } as unknown as Calls;
const ORDER = { sort: null, is_descending: false, filters: [] };

page.value = makePage({
  modules: {
    path: ["", "a", "a.b", "c"],
    label: ["Net", "a", "b", "c"],
    parent: [-1, 0, 1, 0],
    end: [4, 3, 3, 4],
    first_identical: [0, 1, 2, 3],
  },
  sources: { file: ["x.py", "y.py", "x.py"], line: [3, 3, 3] },
  communication: {
    axes: ["dp", "tp"],
    kinds: ["all_gather", "all_reduce"],
    phases: ["forward"],
    causes: [],
    dtypes: [],
    groups: [],
    calls: CALLS,
    ranks: [],
  },
});

test("positions that match become ranges", () => {
  expect(findRanges(6, (position) => position !== 2)).toEqual([
    [0, 1],
    [3, 5],
  ]);
  expect(findRanges(3, () => false)).toEqual([]);
});

test("what is selected and searched for becomes filters", () => {
  navigate({
    view: "communication",
    params: { axis: "tp", rank: "7", line: "x.py:3", m: "a", range: "5-9", q: "gather" },
  });
  const [axis, rank, line, module, range, word] = servedFilters.value;
  expect(axis).toEqual({ axis: [[1, 1]] });
  expect(rank).toEqual({ rank: [[7, 7]] });
  expect(line).toEqual({
    source: [
      [0, 0],
      [2, 2],
    ],
  });
  expect(module).toEqual({ owner: [[1, 2]] });
  expect(range).toEqual({ order: [[5, 9]] });
  expect(word).toMatchObject({ kind: [[0, 0]], axis: [], owner: [] });
});

test("windows that were scrolled past are not fetched", async () => {
  const offsets: number[] = [];
  let release = (): void => {};
  const rows = new ServedRows(ORDER, async ({ offset, limit }) => {
    offsets.push(offset);
    await new Promise<void>((resolve) => {
      release = resolve;
    });
    const rank = Array.from({ length: limit }, (_, row) => offset + row);
    return { num_rows: 10_000, offset, calls: { ...CALLS, rank, order: rank } };
  });
  for (const first of [500, 2_000, 7_990]) rows.show(first, first + 20);
  for (let turn = 0; turn < 3; turn++) {
    if (turn === 2) rows.show(7_990, 8_010); // the number of rows is known by now
    release();
    await new Promise((resolve) => setTimeout(resolve));
  }
  expect(offsets).toEqual([0, 7_500, 8_000, 8_500]); // and the rows that come next
  expect(rows.numRows.value).toBe(10_000);
  expect([rows.hasRow(0), rows.hasRow(600), rows.hasRow(7_999)]).toEqual([true, false, true]);
});

test("a server that does not answer is named, and asked again", async () => {
  let isDown = true;
  const rows = new ServedRows(ORDER, async ({ offset }) => {
    if (isDown) throw new TypeError("Failed to fetch");
    return { num_rows: 1, offset, calls: CALLS };
  });
  await new Promise((resolve) => setTimeout(resolve));
  expect(rows.error.value).toContain("The server does not answer");
  isDown = false;
  rows.show(0, 10);
  await new Promise((resolve) => setTimeout(resolve));
  expect([rows.error.value, rows.numRows.value]).toEqual(["", 1]);
});
