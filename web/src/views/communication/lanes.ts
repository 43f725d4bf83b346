/** Lanes of the timeline, one for each rank, and the visible range. */
import type { Communication } from "../../page";
import { makeTicks } from "../../parts/scale";
import { formatNumber, toFixed } from "../../parts/units";

/** The run's clock, or the order of issue if the clock was not recorded. */
export type XAxis = "time" | "order";

export interface Lane {
  readonly rank: number;
  readonly label: string; // the rank, or all ranks that it represents
  readonly calls: Int32Array; // from left to right
  readonly spans: readonly number[];
}

export interface Range {
  readonly low: number;
  readonly high: number;
}

export interface Lanes {
  readonly all: readonly Lane[];
  readonly xs: readonly number[]; // position of each call on the x axis
  readonly xAxis: XAxis;
  readonly range: Range; // of all calls and spans
  readonly depth: number; // nesting depth of spans
  readonly numLeftOut: number; // ranks without a lane, above MAX_LANES
}

const MAX_LANES = 128;
const MAX_DEPTH = 3;

/** Whether times were recorded: collectives of a simulated world have none. */
export function hasTimes({ calls, spans }: Communication): boolean {
  return calls.rank.length ? calls.start_ns.length > 0 : spans.rank.length > 0;
}

/** Lanes of all ranks, or only of the ranks in `labels`, with those labels. */
export function makeLanes(
  { calls, spans }: Communication,
  xAxis: XAxis,
  labels?: ReadonlyMap<number, string>,
): Lanes {
  const xs = xAxis === "time" ? calls.start_ns : calls.order;
  const byRank = new Map<number, { calls: number[]; spans: number[] }>();
  const getLane = (rank: number) => {
    const laneRows = byRank.get(rank) ?? { calls: [], spans: [] };
    byRank.set(rank, laneRows);
    return laneRows;
  };
  calls.rank.forEach((rank, row) => {
    getLane(rank).calls.push(row);
  });
  if (xAxis === "time") {
    spans.rank.forEach((rank, row) => {
      getLane(rank).spans.push(row);
    });
  }
  const ranks = [...byRank.keys()]
    .filter((rank) => !labels || labels.has(rank))
    .sort((a, b) => a - b);
  const all = ranks.slice(0, MAX_LANES).map((rank) => {
    const laneRows = byRank.get(rank)!;
    return {
      rank,
      label: labels?.get(rank) ?? String(rank),
      calls: Int32Array.from(laneRows.calls).sort((a, b) => xs[a]! - xs[b]! || a - b),
      spans: laneRows.spans,
    };
  });
  const drawn = all.flatMap((lane) => lane.spans);
  const depth = drawn.reduce((max, row) => Math.max(max, spans.depth[row]! + 1), 0);
  return {
    all,
    xs,
    xAxis,
    range: findRange(
      all,
      xs,
      drawn.map((row) => [spans.start_ns[row]!, spans.duration_ns[row]!]),
    ),
    depth: Math.min(depth, MAX_DEPTH),
    numLeftOut: ranks.length - all.length,
  };
}

function findRange(
  lanes: readonly Lane[],
  xs: readonly number[],
  spans: readonly (readonly [number, number])[],
): Range {
  let low = Number.POSITIVE_INFINITY;
  let high = Number.NEGATIVE_INFINITY;
  for (const { calls } of lanes) {
    if (!calls.length) continue;
    low = Math.min(low, xs[calls[0]!]!);
    high = Math.max(high, xs[calls.at(-1)!]!);
  }
  for (const [start, duration] of spans) {
    low = Math.min(low, start);
    high = Math.max(high, start + duration);
  }
  if (low > high) return { low: 0, high: 1 };
  return { low, high: Math.max(high, low + 1) };
}

/** Index in a lane of the nearest call that matches the filter; -1 if there is none. */
export function findNearestCall(
  { calls }: Lane,
  xs: readonly number[],
  x: number,
  isMatch: (row: number) => boolean,
): number {
  let low = 0;
  let high = calls.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[calls[middle]!]! < x) low = middle + 1;
    else high = middle;
  }
  const before = findNextCall({ calls }, low, -1, isMatch);
  const after =
    low < calls.length && isMatch(calls[low]!) ? low : findNextCall({ calls }, low, 1, isMatch);
  if (before < 0 || after < 0) return Math.max(before, after);
  return x - xs[calls[before]!]! <= xs[calls[after]!]! - x ? before : after;
}

/** Index of the next matching call before or after an index; -1 if there is none. */
export function findNextCall(
  { calls }: Pick<Lane, "calls">,
  index: number,
  step: 1 | -1,
  isMatch: (row: number) => boolean,
): number {
  for (let at = index + step; at >= 0 && at < calls.length; at += step) {
    if (isMatch(calls[at]!)) return at;
  }
  return -1;
}

const MIN_SHARE = 1e-5;

/** Scales the visible range by a factor around a point that keeps its position. */
export function zoom(view: Range, full: Range, factor: number, around: number): Range {
  const size = (view.high - view.low) * factor;
  const least = (full.high - full.low) * MIN_SHARE;
  const next = Math.min(Math.max(size, least), full.high - full.low);
  const share = (around - view.low) / (view.high - view.low);
  return clampRange({ low: around - share * next, high: around + (1 - share) * next }, full);
}

export function pan(view: Range, full: Range, by: number): Range {
  return clampRange({ low: view.low + by, high: view.high + by }, full);
}

/** The same range if the point is visible, else a range of the same size centred on it. */
export function panTo(view: Range, full: Range, point: number): Range {
  if (point >= view.low && point <= view.high) return view;
  return pan(view, full, point - (view.low + view.high) / 2);
}

function clampRange({ low, high }: Range, full: Range): Range {
  const size = Math.min(high - low, full.high - full.low);
  const start = Math.min(Math.max(low, full.low), full.high - size);
  return { low: start, high: start + size };
}

const UNITS: readonly [string, number][] = [
  ["s", 1e9],
  ["ms", 1e6],
  ["µs", 1e3],
  ["ns", 1],
];

export interface Tick {
  readonly at: number;
  readonly text: string;
}

/** Round values in the visible range, with as many digits as are needed to tell them apart. */
export function makeTimelineTicks({ low, high }: Range, xAxis: XAxis, count = 6): Tick[] {
  const step = Math.max(makeTicks(high - low, count)[1] ?? 1, xAxis === "order" ? 1 : 0);
  const first = Math.ceil(low / step);
  const number = Math.max(Math.floor(high / step) - first + 1, 0);
  const ticks = Array.from({ length: number }, (_, i) => (first + i) * step);
  if (xAxis === "order") return ticks.map((at) => ({ at, text: formatNumber(at) }));
  const [unit, size] = UNITS.find(([, unitSize]) => high >= unitSize) ?? UNITS.at(-1)!;
  const digits = Math.max(Math.ceil(-Math.log10(step / size) - 1e-9), 0);
  return ticks.map((at) => ({ at, text: `${toFixed(at / size, digits)} ${unit}` }));
}
