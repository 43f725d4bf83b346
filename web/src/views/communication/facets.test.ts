import { beforeEach, expect, test } from "vitest";
import type { Communication } from "../../page";
import { navigate } from "../../store/route";
import { fillCell, markCalls, markReasons, readFacets, usedPositions } from "./facets";

const SAID = {
  axes: ["dp", "tp"],
  kinds: ["all_reduce", "all_gather"],
  phases: ["forward", "backward", "optimizer"],
  sums: [
    { axis: 0, kind: 1, phase: 0, count: 2, wire_bytes: 100 },
    { axis: 0, kind: 1, phase: 1, count: 3, wire_bytes: 50 },
    { axis: 1, kind: 0, phase: 1, count: 4, wire_bytes: 8 },
  ],
  reasons: [
    { words: 0, what: "all_gather[dp]" },
    { words: 1, what: "all_reduce[tp]" },
    { words: 0, what: "all_reduce[tp]" },
  ],
  calls: { axis: [0, 0, 1, 1], kind: [1, 1, 0, 0], phase: [0, 1, 1, 0], cause: [0, 0, 1, 0] },
} as unknown as Communication;

beforeEach(() => navigate({ view: "communication", params: {} }));

function look(params: Record<string, string>) {
  navigate({ view: "communication", params });
  return readFacets(SAID);
}

test("an address says what is looked at; names that nobody knows leave it open", () => {
  expect(look({ axis: "tp", kind: "all_reduce" })).toEqual({ axis: 1, kind: 0, phase: -1 });
  expect(look({ axis: "zz" })).toEqual({ axis: -1, kind: -1, phase: -1 });
});

test("calls are marked by all that is asked for", () => {
  expect([...markCalls(SAID, look({}))]).toEqual([1, 1, 1, 1]);
  expect([...markCalls(SAID, look({ axis: "tp", phase: "backward" }))]).toEqual([0, 0, 1, 0]);
});

test("reasons are those that led to a call that is looked at", () => {
  expect(markReasons(SAID, look({}))).toEqual([true, true, true]);
  expect(markReasons(SAID, look({ axis: "tp" }))).toEqual([false, true, true]);
  expect(markReasons(SAID, look({ axis: "tp", phase: "forward" }))).toEqual([false, false, true]);
  expect(markReasons(SAID, look({ phase: "optimizer" }))).toEqual([false, false, false]);
});

test("a cell adds up its phases, and a sum all cells", () => {
  const cell = fillCell(SAID, { axis: 0, kind: 1, phase: -1 }, "bytes");
  expect(cell).toMatchObject({ value: 150, phases: [100, 50, 0], numSums: 2 });
  expect(fillCell(SAID, { axis: -1, kind: -1, phase: -1 }, "counts").value).toBe(9);
  expect(fillCell(SAID, { axis: 0, kind: 0, phase: -1 }, "bytes").numSums).toBe(0);
  expect(usedPositions(SAID, "phase")).toEqual([0, 1]);
});
