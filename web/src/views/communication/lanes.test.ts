import { expect, test } from "vitest";
import type { Communication } from "../../page";
import { bring, hasTimes, layLanes, makeMoments, nearestIn, pan, stepIn, zoom } from "./lanes";
import { heightOfCall } from "./paint";
import { findAt, findSpanAt, makeFrame, rowOf, type Scene, walk } from "./scene";

// Rank 3 issued the last two; rank 0's clock ran backwards once.
const SAID = {
  calls: {
    rank: [0, 0, 0, 3, 3],
    order: [0, 1, 2, 0, 1],
    start_ns: [100, 400, 300, 120, 900],
  },
  spans: { rank: [0, 0], start_ns: [50, 60], duration_ns: [200, 1000], depth: [0, 1] },
} as unknown as Communication;
const TIME = layLanes(SAID, "time");
const ORDER = layLanes(SAID, "order");
const all = (): boolean => true;

test("each rank has a lane, its calls from left to right", () => {
  expect(TIME.all.map(({ rank, calls }) => [rank, [...calls]])).toEqual([
    [0, [0, 2, 1]],
    [3, [3, 4]],
  ]);
  expect(ORDER.all[0]!.calls).toEqual(Int32Array.of(0, 1, 2));
  const folded = layLanes(SAID, "time", new Map([[3, "3-7"]]));
  expect(folded.all.map(({ rank, label }) => [rank, label])).toEqual([[3, "3-7"]]);
});

test("a timeline reaches as far as its spans, and its order as far as its calls", () => {
  expect(TIME.range).toEqual({ low: 50, high: 1060 });
  expect([ORDER.range, ORDER.depth]).toEqual([{ low: 0, high: 2 }, 0]);
  expect(TIME.depth).toBe(2);
  const nothing = { calls: { rank: [], start_ns: [], order: [] }, spans: { rank: [] } };
  expect(layLanes(nothing as unknown as Communication, "time").range).toEqual({ low: 0, high: 1 });
});

test("collectives without the run's clock have an order only, even if phases were timed", () => {
  const calls = { ...SAID.calls, start_ns: [] };
  expect(hasTimes({ ...SAID, calls } as unknown as Communication)).toBe(false);
  expect(hasTimes(SAID)).toBe(true);
  const zero = { ...SAID.calls, start_ns: [0, 0, 0, 0, 0] };
  expect(hasTimes({ ...SAID, calls: zero } as unknown as Communication)).toBe(true);
});

test("too many lanes are left out and counted", () => {
  const rank = Array.from({ length: 300 }, (_, i) => i);
  const calls = { rank, order: rank.map(() => 0), start_ns: rank };
  const lanes = layLanes({ ...SAID, calls } as unknown as Communication, "order");
  expect([lanes.all.length, lanes.numLeftOut]).toEqual([128, 172]);
});

test("the nearest call is one of those that are wanted", () => {
  const [lane] = TIME.all;
  expect([0, 190, 210, 360, 5000].map((x) => nearestIn(lane!, TIME.xs, x, all))).toEqual([
    0, 0, 1, 2, 2,
  ]);
  expect(nearestIn(lane!, TIME.xs, 300, (row) => row === 0)).toBe(0);
  expect(nearestIn(lane!, TIME.xs, 300, () => false)).toBe(-1);
  expect(stepIn(lane!, 0, 1, (row) => row === 1)).toBe(2);
  expect(stepIn(lane!, 2, 1, all)).toBe(-1);
});

test("zooming keeps what is under the pointer and never leaves what there is", () => {
  const whole = { low: 0, high: 100 };
  expect(zoom(whole, whole, 0.5, 20)).toEqual({ low: 10, high: 60 });
  expect(zoom({ low: 0, high: 10 }, whole, 100, 5)).toEqual(whole);
  expect(zoom({ low: 5, high: 5 + 1e-9 }, whole, 0.5, 5).high).toBeCloseTo(5.001);
  expect(pan({ low: 10, high: 60 }, whole, 500)).toEqual({ low: 50, high: 100 });
  expect(bring({ low: 10, high: 20 }, whole, 80)).toEqual({ low: 75, high: 85 });
  expect(bring({ low: 10, high: 20 }, whole, 15)).toEqual({ low: 10, high: 20 });
});

test("moments in sight are told to as many digits as keep them apart", () => {
  const texts = (low: number, high: number) =>
    makeMoments({ low, high }, "time", 4).map(({ text }) => text);
  expect(texts(0, 4e9)).toEqual(["0 s", "1 s", "2 s", "3 s", "4 s"]);
  expect(texts(1.2e9, 1.2002e9)).toEqual([
    "1.20000 s",
    "1.20005 s",
    "1.20010 s",
    "1.20015 s",
    "1.20020 s",
  ]);
  expect(makeMoments({ low: 2.2, high: 5.1 }, "order").map(({ text }) => text)).toEqual([
    "3",
    "4",
    "5",
  ]);
});

const SCENE: Scene = {
  lanes: TIME,
  view: TIME.range,
  marks: Uint8Array.of(1, 0, 1, 1, 1),
  frame: makeFrame(TIME, TIME.range, 1000, 14),
};

test("the pointer finds calls that are near and looked at", () => {
  const { frame } = SCENE;
  const y = frame.top + 1.5 * frame.laneHeight;
  expect(rowOf(SCENE, findAt(SCENE, frame.x(900) + 3, y))).toBe(4);
  expect(findAt(SCENE, frame.x(500), y)).toBeNull();
  // Row 1 is at 400, but not looked at.
  expect(findAt(SCENE, frame.x(400), frame.top + 1)).toBeNull();
  expect(findAt(SCENE, frame.x(100), frame.height + 50)).toBeNull();
});

test("the pointer finds named stretches, the inner one below the outer", () => {
  const { frame } = SCENE;
  const inner = frame.top + 0.75 * frame.spanHeight;
  expect(findSpanAt(SCENE, SAID.spans, frame.x(200), frame.top + 2)).toBe(0);
  expect(findSpanAt(SCENE, SAID.spans, frame.x(200), inner)).toBe(1);
  expect(findSpanAt(SCENE, SAID.spans, frame.x(500), frame.top + 2)).toBe(-1);
  expect(findSpanAt(SCENE, SAID.spans, frame.x(200), frame.top + frame.spanHeight + 1)).toBe(-1);
});

test("keys walk along a lane and across lanes, past what is not looked at", () => {
  const rows = ["ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown", "End", "Home", "ArrowUp"];
  let at = null as ReturnType<typeof walk>;
  const seen = rows.map((key) => {
    at = walk(SCENE, at, key);
    return rowOf(SCENE, at);
  });
  expect(seen).toEqual([0, 2, 2, 3, 4, 3, 0]);
  expect(walk(SCENE, at, "x")).toBeNull();
});

test("bars are as high as what is sent, and nothing has no height", () => {
  expect([0, 1, 50, 100].map((bytes) => heightOfCall(bytes, 100, 80))).toEqual([0, 0.8, 40, 80]);
  expect(heightOfCall(0, 0, 80)).toBe(0);
});
