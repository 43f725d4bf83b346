import { beforeEach, expect, test } from "vitest";
import { makePage } from "../../store/empty_page";
import { page } from "../../store/page";
import { navigate } from "../../store/route";
import { fillCell, sumFacets, usedPositions } from "./facets";

const TRAFFIC = {
  rank_set: [0, 0, 0, 1],
  axis: [0, 0, 1, 1],
  kind: [1, 1, 0, 0],
  phase: [0, 1, 1, 1],
  owner: [0, 0, 0, 0],
  cause: [0, 0, 0, 0],
  source: [-1, -1, -1, -1],
  dtype: [0, 0, 0, 0],
  step: [],
  count: [2, 3, 4, 1],
  input_bytes: [0, 0, 0, 0],
  wire_bytes: [100, 50, 8, 9],
};

function open(params: Record<string, string>): void {
  navigate({ view: "communication", params });
}

beforeEach(() => {
  page.value = makePage({
    modules: { path: [""], end: [1], parent: [-1] },
    sources: { file: [], line: [] },
    communication: {
      axes: ["dp", "tp"],
      kinds: ["all_reduce", "all_gather"],
      phases: ["forward", "backward", "optimizer"],
      ranks: [{ ranks: "0-7" }, { ranks: "8-15" }],
      traffic: TRAFFIC,
    },
  });
  open({});
});

test("a cell is the sum of its phases, and a total the sum of all cells", () => {
  const sums = sumFacets();
  expect(fillCell(sums, 0, 1, "bytes")).toMatchObject({
    value: 150,
    phases: [100, 50],
    numSums: 2,
  });
  expect(fillCell(sums, 1, 0, "bytes")).toMatchObject({ value: 9, phases: [0, 9] }); // the busiest
  expect(fillCell(sums, -1, -1, "counts").value).toBe(6);
  expect(fillCell(sums, 0, 0, "bytes").numSums).toBe(0);
  expect(usedPositions(TRAFFIC, "phase")).toEqual([0, 1]);
});

test("totals are of what is selected, and cells of other axes keep their figures", () => {
  open({ axis: "dp" });
  const sums = sumFacets();
  expect(fillCell(sums, -1, -1, "bytes").value).toBe(150);
  expect(fillCell(sums, 1, -1, "bytes").value).toBe(9);
  open({ rank: "3", phase: "backward" });
  expect(fillCell(sumFacets(), -1, -1, "bytes")).toMatchObject({ value: 58, phases: [0, 58] });
});
