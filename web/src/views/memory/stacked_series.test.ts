import { expect, test } from "vitest";
import type { MemoryCurve } from "../../page";
import { findSample, stackKinds, sumAt, sumKinds, usedKinds } from "./stacked_series";

const CURVE = {
  kinds: ["parameters", "gradients", "activations"],
  order: [0, 10, 40],
  num_bytes: [
    [4, 4, 4],
    [0, 0, 0],
    [0, 6, 1],
  ],
  peak: 1,
} as unknown as MemoryCurve;

test("kinds are stacked on each other", () => {
  expect(stackKinds(CURVE)).toEqual([
    [4, 4, 4],
    [4, 4, 4],
    [4, 10, 5],
  ]);
  expect(sumAt(CURVE, 1)).toBe(10);
});

test("a moment belongs to the last sample before it", () => {
  expect([0, 9, 10, 39, 1000].map((moment) => findSample(CURVE.order, moment))).toEqual([
    0, 0, 1, 1, 2,
  ]);
});

test("kinds without bytes are left out, and the largest comes first", () => {
  expect(usedKinds(CURVE)).toEqual([0, 2]);
  expect(sumKinds(CURVE)).toEqual([
    { kind: 2, numBytes: 6 },
    { kind: 0, numBytes: 4 },
  ]);
});
