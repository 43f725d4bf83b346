import { expect, test } from "vitest";
import { blockOf, labelStep, placeOfRank } from "./mesh";
import { foldModules } from "./reasons";

const MESH = [
  { name: "pp", size: 2 },
  { name: "dp", size: 3 },
  { name: "tp", size: 4 },
];

test("ranks are numbered along the last axis first", () => {
  expect([0, 5, 23].map((rank) => placeOfRank(rank, MESH, 24))).toEqual([
    "pp 0, dp 0, tp 0",
    "pp 0, dp 1, tp 1",
    "pp 1, dp 2, tp 3",
  ]);
  expect(blockOf(MESH, 24)).toBe(4);
});

test("a mesh of some ranks tells nobody's place", () => {
  expect(placeOfRank(3, MESH, 48)).toBe("");
  expect(placeOfRank(3, [], 4)).toBe("");
  expect([blockOf(MESH, 48), blockOf([{ name: "tp", size: 4 }], 4)]).toEqual([0, 0]);
});

test("labels that have no room are left out", () => {
  expect([labelStep(64, 30, 26), labelStep(64, 6, 26), labelStep(3, 0, 26)]).toEqual([1, 8, 4]);
});

test("modules that are alike are told once", () => {
  const likes = [0, 1, 1, 1, 4];
  expect(foldModules([3, 2, 4, 1, -1], likes)).toEqual([
    { module: 1, count: 3 },
    { module: 4, count: 1 },
    { module: -1, count: 1 },
  ]);
});
