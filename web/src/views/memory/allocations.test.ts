import { expect, test } from "vitest";
import type { Allocations } from "../../page";
import { findEvent, sumGroups } from "./allocations";

// A parameter from before, an activation, a buffer of two modules, and one that outlives the step.
const TABLE = {
  first: 9,
  last: 15,
  start: [-1, 10, 11, 11, 14],
  end: [16, 13, 12, 12, 16],
  num_bytes: [100, 40, 6, 4, 9],
  module: [0, 0, 0, 1, 1],
  kind: [0, 1, 2, 2, 1],
} as unknown as Allocations;

const byModule = (row: number): number => TABLE.module[row]!;

function sizes(at: number, from: number | null = null) {
  return sumGroups(TABLE, { at, from }, byModule).map((group) => [group.key, group.numBytes]);
}

test("what is in use after an event includes what it allocated, and not what it freed", () => {
  expect(sizes(9)).toEqual([[0, 100]]);
  expect(sizes(11)).toEqual([
    [0, 146],
    [1, 4],
  ]);
  expect(sizes(12)).toEqual([[0, 140]]);
  expect(sizes(15)).toEqual([
    [0, 100],
    [1, 9],
  ]);
});

test("parts of an allocation in one group count once", () => {
  const [group] = sumGroups(TABLE, { at: 11, from: null }, () => 0);
  expect(group).toMatchObject({ numBytes: 150, count: 3, bytesByKind: [100, 40, 10] });
});

test("between two instants, allocated less freed is the change", () => {
  for (const [from, at] of [
    [9, 15],
    [11, 14],
    [9, 10],
  ] as const) {
    for (const group of sumGroups(TABLE, { at, from }, byModule)) {
      expect(group.beforeBytes + group.allocatedBytes - group.freedBytes).toBe(group.numBytes);
    }
  }
  const groups = sumGroups(TABLE, { at: 15, from: 9 }, byModule);
  expect(
    groups.map(({ key, allocatedBytes, freedBytes }) => [key, allocatedBytes, freedBytes]),
  ).toEqual([
    [1, 13, 4],
    [0, 46, 46],
  ]);
});

test("a filter leaves rows out", () => {
  const shown = (row: number): boolean => TABLE.num_bytes[row]! < 50;
  expect(sumGroups(TABLE, { at: 11, from: null }, () => 0, shown)[0]?.numBytes).toBe(50);
});

test("keys move from event to event", () => {
  expect(findEvent(TABLE, 11, 1)).toBe(12);
  expect(findEvent(TABLE, 13, 1)).toBe(14);
  expect(findEvent(TABLE, 14, -1)).toBe(13);
  expect(findEvent(TABLE, 15, 1)).toBe(null);
});
