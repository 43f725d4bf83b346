import { expect, test } from "vitest";
import { foldModules } from "./causes";
import { countInnermostRanks, formatCoordinate, labelStep } from "./mesh";

const MESH = [
  { name: "pp", size: 2 },
  { name: "dp", size: 3 },
  { name: "tp", size: 4 },
];

test("ranks are numbered along the last axis first", () => {
  expect([0, 5, 23].map((rank) => formatCoordinate(rank, MESH, 24))).toEqual([
    "pp 0, dp 0, tp 0",
    "pp 0, dp 1, tp 1",
    "pp 1, dp 2, tp 3",
  ]);
  expect(countInnermostRanks(MESH, 24)).toBe(4);
});

test("a mesh that does not cover all ranks gives no coordinates", () => {
  expect(formatCoordinate(3, MESH, 48)).toBe("");
  expect(formatCoordinate(3, [], 4)).toBe("");
  expect([
    countInnermostRanks(MESH, 48),
    countInnermostRanks([{ name: "tp", size: 4 }], 4),
  ]).toEqual([0, 0]);
});

test("labels without room are left out", () => {
  expect([labelStep(64, 30, 26), labelStep(64, 6, 26), labelStep(3, 0, 26)]).toEqual([1, 8, 4]);
});

test("identical modules are folded", () => {
  const firsts = [0, 1, 1, 1, 4];
  expect(foldModules([3, 2, 4, 1, -1], firsts)).toEqual([
    { module: 1, count: 3 },
    { module: 4, count: 1 },
    { module: -1, count: 1 },
  ]);
});
