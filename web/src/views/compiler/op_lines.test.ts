import { expect, test } from "vitest";
import type { GraphItem } from "../../page";
import { groupByLine } from "./op_lines";

const GRAPH = { op: ["a", "b", "c", "d", "e"], line: [4, 4, 7, 4, -1] } as unknown as GraphItem;

test("consecutive ops of a line are together, and a loop comes back to its line", () => {
  expect(groupByLine(GRAPH, () => true)).toEqual([
    { line: 4, ops: [0, 1] },
    { line: 7, ops: [2] },
    { line: 4, ops: [3] },
    { line: -1, ops: [4] },
  ]);
});

test("ops that a search hides leave no empty lines", () => {
  expect(groupByLine(GRAPH, (op) => op !== 2)).toEqual([
    { line: 4, ops: [0, 1, 3] },
    { line: -1, ops: [4] },
  ]);
});
