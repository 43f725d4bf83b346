import { beforeEach, expect, test } from "vitest";
import type { Communication } from "../../page";
import { navigate } from "../../store/route";
import { fillCell, matchCalls, matchCauses, readFacets, usedPositions } from "./facets";

const COMMUNICATION = {
  axes: ["dp", "tp"],
  kinds: ["all_reduce", "all_gather"],
  phases: ["forward", "backward", "optimizer"],
  sums: [
    { axis: 0, kind: 1, phase: 0, count: 2, wire_bytes: 100 },
    { axis: 0, kind: 1, phase: 1, count: 3, wire_bytes: 50 },
    { axis: 1, kind: 0, phase: 1, count: 4, wire_bytes: 8 },
  ],
  cause_rows: [
    { cause: 0, what: "all_gather[dp]" },
    { cause: 1, what: "all_reduce[tp]" },
    { cause: 0, what: "all_reduce[tp]" },
  ],
  calls: { axis: [0, 0, 1, 1], kind: [1, 1, 0, 0], phase: [0, 1, 1, 0], cause: [0, 0, 1, 0] },
} as unknown as Communication;

beforeEach(() => navigate({ view: "communication", params: {} }));

function readFacetsOf(params: Record<string, string>) {
  navigate({ view: "communication", params });
  return readFacets(COMMUNICATION);
}

test("the filter is read from the address, and unknown names are ignored", () => {
  expect(readFacetsOf({ axis: "tp", kind: "all_reduce" })).toEqual({ axis: 1, kind: 0, phase: -1 });
  expect(readFacetsOf({ axis: "zz" })).toEqual({ axis: -1, kind: -1, phase: -1 });
});

test("calls match if they match every part of the filter", () => {
  expect([...matchCalls(COMMUNICATION, readFacetsOf({}))]).toEqual([1, 1, 1, 1]);
  expect([...matchCalls(COMMUNICATION, readFacetsOf({ axis: "tp", phase: "backward" }))]).toEqual([
    0, 0, 1, 0,
  ]);
});

test("causes match if one of their calls matches", () => {
  expect(matchCauses(COMMUNICATION, readFacetsOf({}))).toEqual([true, true, true]);
  expect(matchCauses(COMMUNICATION, readFacetsOf({ axis: "tp" }))).toEqual([false, true, true]);
  expect(matchCauses(COMMUNICATION, readFacetsOf({ axis: "tp", phase: "forward" }))).toEqual([
    false,
    false,
    true,
  ]);
  expect(matchCauses(COMMUNICATION, readFacetsOf({ phase: "optimizer" }))).toEqual([
    false,
    false,
    false,
  ]);
});

test("a cell is the sum of its phases, and a total the sum of all cells", () => {
  const cell = fillCell(COMMUNICATION, { axis: 0, kind: 1, phase: -1 }, "bytes");
  expect(cell).toMatchObject({ value: 150, phases: [100, 50, 0], numSums: 2 });
  expect(fillCell(COMMUNICATION, { axis: -1, kind: -1, phase: -1 }, "counts").value).toBe(9);
  expect(fillCell(COMMUNICATION, { axis: 0, kind: 0, phase: -1 }, "bytes").numSums).toBe(0);
  expect(usedPositions(COMMUNICATION, "phase")).toEqual([0, 1]);
});
