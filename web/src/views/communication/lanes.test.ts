import { expect, test } from "vitest";
import type { Communication } from "../../page";
import {
  findBands,
  findNearestCall,
  findNextCall,
  hasTimes,
  type LaneKind,
  makeLanes,
} from "./lanes";
import { formatView, makeTimelineTicks, pan, panTo, parseView, type XAxis, zoom } from "./ranges";
import {
  barHeight,
  findCallAt,
  findSpanAt,
  listBars,
  makeFrame,
  moveByKey,
  rowAt,
  sumColumns,
  type TimelineLayout,
} from "./timeline_layout";

// Rank 3 issued the last two; rank 0's clock ran backwards once.
const COMMUNICATION = {
  calls: {
    rank: [0, 0, 0, 3, 3],
    order: [0, 1, 2, 0, 1],
    start_ns: [100, 400, 300, 120, 900],
    phase: [0, 1, 0, 0, 0],
    axis: [1, 0, 1, 0, 0],
    owner: [0, 1, 2, 0, 0],
    wire_bytes: [5, 50, 10, 0, 0],
  },
  ranks: [{ example: 3, ranks: "3-7" }],
  axes: ["dp", "tp"],
  spans: { rank: [0, 0], start_ns: [50, 60], duration_ns: [200, 1000], depth: [0, 1] },
} as unknown as Communication;

function lay(xAxis: XAxis, kind: LaneKind = "ranks", communication = COMMUNICATION) {
  const nameModule = (position: number): string => (position === 1 ? "head" : "layers.*");
  return makeLanes({ communication, xAxis, kind, rank: 0, nameModule });
}

const TIME = lay("time");
const ORDER = lay("order");
const all = (): boolean => true;

test("each rank has a lane, its calls from left to right", () => {
  expect(TIME.all.map(({ rank, calls }) => [rank, [...calls]])).toEqual([
    [0, [0, 2, 1]],
    [3, [3, 4]],
  ]);
  expect(ORDER.all[0]!.calls).toEqual(Int32Array.of(0, 1, 2));
  const folded = lay("time", "alike");
  expect(folded.all.map(({ rank, label }) => [rank, label])).toEqual([[3, "3-7"]]);
});

test("the range covers all spans by time, and all calls by order", () => {
  expect(TIME.range).toEqual({ low: 50, high: 1060 });
  expect([ORDER.range, ORDER.depth]).toEqual([{ low: 0, high: 2 }, 0]);
  expect(TIME.depth).toBe(2);
  const calls = { rank: [], start_ns: [], order: [] };
  const nothing = { ...COMMUNICATION, calls, spans: { rank: [] } } as unknown as Communication;
  expect(lay("time", "axis", nothing).range).toEqual({ low: 0, high: 1 });
});

test("collectives without times are shown in order, even if phases were timed", () => {
  const calls = { ...COMMUNICATION.calls, start_ns: [] };
  expect(hasTimes({ ...COMMUNICATION, calls } as unknown as Communication)).toBe(false);
  expect(hasTimes(COMMUNICATION)).toBe(true);
  const zero = { ...COMMUNICATION.calls, start_ns: [0, 0, 0, 0, 0] };
  expect(hasTimes({ ...COMMUNICATION, calls: zero } as unknown as Communication)).toBe(true);
});

test("too many lanes are left out and counted", () => {
  const rank = Array.from({ length: 300 }, (_, i) => i);
  const calls = { rank, order: rank.map(() => 0), start_ns: rank, phase: rank };
  const communication = { ...COMMUNICATION, calls } as unknown as Communication;
  const lanes = lay("order", "ranks", communication);
  expect([lanes.all.length, lanes.numLeftOut]).toEqual([128, 172]);
});

test("lanes of one rank are its axes in the order of the mesh, or the modules that send most", () => {
  const axes = lay("time", "axis");
  expect(axes.all.map(({ label, calls }) => [label, [...calls]])).toEqual([
    ["dp", [1]],
    ["tp", [0, 2]],
  ]);
  expect([axes.rank, axes.headSpans]).toEqual([0, [0, 1]]);
  const modules = lay("order", "module").all.map(({ label, calls }) => [label, [...calls]]);
  expect(modules).toEqual([
    ["head", [1]],
    ["layers.*", [0, 2]],
  ]);
});

test("phases are bands that follow each other", () => {
  expect(lay("order", "axis").headBands).toEqual([
    { phase: 0, low: -0.5, high: 0.5 },
    { phase: 1, low: 0.5, high: 1.5 },
    { phase: 0, low: 1.5, high: 2.5 },
  ]);
  expect(TIME.all[0]!.bands).toEqual([
    { phase: 0, low: 100, high: 400 },
    { phase: 1, low: 400, high: 400 },
  ]);
  expect(findBands(Int32Array.of(), [], [], "time")).toEqual([]);
});

test("the nearest call matches the filter", () => {
  const [lane] = TIME.all;
  expect([0, 190, 210, 360, 5000].map((x) => findNearestCall(lane!, TIME.xs, x, all))).toEqual([
    0, 0, 1, 2, 2,
  ]);
  expect(findNearestCall(lane!, TIME.xs, 300, (row) => row === 0)).toBe(0);
  expect(findNearestCall(lane!, TIME.xs, 300, () => false)).toBe(-1);
  expect(findNextCall(lane!, 0, 1, (row) => row === 1)).toBe(2);
  expect(findNextCall(lane!, 2, 1, all)).toBe(-1);
});

test("zooming keeps the point under the pointer and stays in the full range", () => {
  const full = { low: 0, high: 100 };
  expect(zoom(full, full, 0.5, 20)).toEqual({ low: 10, high: 60 });
  expect(zoom({ low: 0, high: 10 }, full, 100, 5)).toEqual(full);
  expect(zoom({ low: 5, high: 5 + 1e-9 }, full, 0.5, 5).high).toBeCloseTo(5.001);
  expect(pan({ low: 10, high: 60 }, full, 500)).toEqual({ low: 50, high: 100 });
  expect(panTo({ low: 10, high: 20 }, full, 80)).toEqual({ low: 75, high: 85 });
  expect(panTo({ low: 10, high: 20 }, full, 15)).toEqual({ low: 10, high: 20 });
});

test("ticks have as many digits as are needed to tell them apart", () => {
  const texts = (low: number, high: number) =>
    makeTimelineTicks({ low, high }, "time", 4).map(({ text }) => text);
  expect(texts(0, 4e9)).toEqual(["0 s", "1 s", "2 s", "3 s", "4 s"]);
  expect(texts(1.2e9, 1.2002e9)).toEqual([
    "1.20000 s",
    "1.20005 s",
    "1.20010 s",
    "1.20015 s",
    "1.20020 s",
  ]);
  // Two ticks do not fit evenly, and no tick for each call takes their place.
  expect(makeTimelineTicks({ low: 0, high: 425 }, "order", 2).map(({ at }) => at)).toEqual([
    0, 200, 400,
  ]);
  expect(makeTimelineTicks({ low: 2.2, high: 5.1 }, "order").map(({ text }) => text)).toEqual([
    "3",
    "4",
    "5",
  ]);
});

const LAYOUT: TimelineLayout = {
  lanes: TIME,
  view: TIME.range,
  matches: Uint8Array.of(1, 0, 1, 1, 1),
  frame: makeFrame(TIME, TIME.range, 1000, 14),
};

test("the pointer finds near calls that match the filter", () => {
  const { frame } = LAYOUT;
  const y = frame.top + 1.5 * frame.laneHeight;
  expect(rowAt(LAYOUT, findCallAt(LAYOUT, frame.x(900) + 3, y))).toBe(4);
  expect(findCallAt(LAYOUT, frame.x(500), y)).toBeNull();
  // Row 1 is at 400, but filtered out.
  expect(findCallAt(LAYOUT, frame.x(400), frame.top + 1)).toBeNull();
  expect(findCallAt(LAYOUT, frame.x(100), frame.height + 50)).toBeNull();
});

test("the pointer finds spans, the inner one below the outer", () => {
  const { frame } = LAYOUT;
  const inner = frame.top + 0.75 * frame.spanHeight;
  expect(findSpanAt(LAYOUT, COMMUNICATION.spans, frame.x(200), frame.top + 2)).toBe(0);
  expect(findSpanAt(LAYOUT, COMMUNICATION.spans, frame.x(200), inner)).toBe(1);
  expect(findSpanAt(LAYOUT, COMMUNICATION.spans, frame.x(500), frame.top + 2)).toBe(-1);
  expect(
    findSpanAt(LAYOUT, COMMUNICATION.spans, frame.x(200), frame.top + frame.spanHeight + 1),
  ).toBe(-1);
});

test("arrow keys move along and across lanes, skipping calls that do not match the filter", () => {
  const rows = ["ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown", "End", "Home", "ArrowUp"];
  let position = null as ReturnType<typeof moveByKey>;
  const visited = rows.map((key) => {
    position = moveByKey(LAYOUT, position, key);
    return rowAt(LAYOUT, position);
  });
  expect(visited).toEqual([0, 2, 2, 3, 4, 3, 0]);
  expect(moveByKey(LAYOUT, position, "x")).toBeNull();
});

test("calls that share a pixel are one bar, of the largest of them", () => {
  const number = 30_000;
  const rows = Array.from({ length: number }, (_, i) => i);
  const calls = {
    ...{ rank: rows.map(() => 0), order: rows, start_ns: [], phase: rows.map((i) => i % 2) },
    ...{ axis: rows.map(() => 0), owner: rows.map(() => 0), wire_bytes: rows.map((i) => i % 1000) },
  };
  const lanes = lay("order", "axis", { ...COMMUNICATION, calls } as unknown as Communication);
  const frame = makeFrame(lanes, lanes.range, 1000, 14);
  const matches = new Uint8Array(number).fill(1);
  const bars = listBars(
    lanes.all[0]!,
    { lanes, view: lanes.range, matches, frame },
    calls.wire_bytes,
    true,
  );
  expect(bars.length).toBeLessThanOrEqual(1000);
  expect(bars.filter(({ row }) => calls.wire_bytes[row] === 999)).toHaveLength(30);
  const view = { low: 100, high: 110 };
  const zoomed = { lanes, view, matches, frame: makeFrame(lanes, view, 1000, 14) };
  const visible = listBars(lanes.all[0]!, zoomed, calls.wire_bytes, true).map(({ row }) => row);
  expect([visible[0], visible.at(-1)]).toEqual([100, 110]);
  const columns = sumColumns(lanes, calls, 10, 2);
  const total = calls.wire_bytes.reduce((a, b) => a + b, 0);
  expect(columns.flatMap((column) => [...column]).reduce((a, b) => a + b, 0)).toBe(total);
});

test("the visible range survives a round trip through the address", () => {
  const full = { low: 0, high: 4e9 };
  const view = { low: 1.2e9, high: 1.25e9 };
  expect(parseView(formatView(view, full)!, full)).toEqual(view);
  expect(formatView(full, full)).toBeNull();
  expect(formatView({ low: 1.23456, high: 2.34567 }, { low: 0, high: 9 })).toBe("1.235_2.346");
  expect(["", "3_1", "x_y", "1_9e9", undefined].map((text) => parseView(text, full))).toEqual(
    Array(5).fill(null),
  );
});

test("the height of a bar is proportional to the bytes sent, or to their logarithm", () => {
  expect([0, 1, 50, 100].map((bytes) => barHeight(bytes, 100, 80))).toEqual([0, 0.8, 40, 80]);
  expect(barHeight(0, 0, 80)).toBe(0);
  expect([0, 3, 1023].map((bytes) => barHeight(bytes, 1023, 80, "log"))).toEqual([0, 16, 80]);
});
