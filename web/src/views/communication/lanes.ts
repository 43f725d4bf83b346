/** Where collectives lie on a timeline: a lane for each rank, and from when to when is in sight. */
import type { Communication } from "../../page";
import { makeTicks } from "../../parts/scale";
import { formatNumber, toFixed } from "../../parts/units";

/** By the run's clock, or in the order of issue where it was not recorded. */
export type Along = "time" | "order";

export interface Lane {
  readonly rank: number;
  readonly label: string; // the rank, or those that it stands for
  readonly calls: Int32Array; // from left to right
  readonly spans: readonly number[];
}

export interface Range {
  readonly low: number;
  readonly high: number;
}

export interface Lanes {
  readonly all: readonly Lane[];
  readonly xs: readonly number[]; // of each call
  readonly along: Along;
  readonly range: Range; // of everything
  readonly depth: number; // of spans within spans
  readonly numLeftOut: number; // ranks that there is no room for
}

const MAX_LANES = 128;
const MAX_DEPTH = 3;

/** Whether there are times: Python leaves out those of a simulated world's collectives. */
export function hasTimes({ calls, spans }: Communication): boolean {
  return calls.rank.length ? calls.start_ns.length > 0 : spans.rank.length > 0;
}

/** Lanes of all ranks, or of some that stand for others too, by what they are called. */
export function layLanes(
  { calls, spans }: Communication,
  along: Along,
  wanted?: ReadonlyMap<number, string>,
): Lanes {
  const xs = along === "time" ? calls.start_ns : calls.order;
  const byRank = new Map<number, { calls: number[]; spans: number[] }>();
  const laneOf = (rank: number) => {
    const known = byRank.get(rank) ?? { calls: [], spans: [] };
    byRank.set(rank, known);
    return known;
  };
  calls.rank.forEach((rank, row) => {
    laneOf(rank).calls.push(row);
  });
  if (along === "time") {
    spans.rank.forEach((rank, row) => {
      laneOf(rank).spans.push(row);
    });
  }
  const ranks = [...byRank.keys()]
    .filter((rank) => !wanted || wanted.has(rank))
    .sort((a, b) => a - b);
  const all = ranks.slice(0, MAX_LANES).map((rank) => {
    const found = byRank.get(rank)!;
    return {
      rank,
      label: wanted?.get(rank) ?? String(rank),
      calls: Int32Array.from(found.calls).sort((a, b) => xs[a]! - xs[b]! || a - b),
      spans: found.spans,
    };
  });
  const drawn = all.flatMap((lane) => lane.spans);
  const depth = drawn.reduce((most, row) => Math.max(most, spans.depth[row]! + 1), 0);
  return {
    all,
    xs,
    along,
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

/** Place in a lane of the call that is nearest; -1 where it has none that is wanted. */
export function nearestIn(
  { calls }: Lane,
  xs: readonly number[],
  x: number,
  isWanted: (row: number) => boolean,
): number {
  let low = 0;
  let high = calls.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[calls[middle]!]! < x) low = middle + 1;
    else high = middle;
  }
  const before = stepIn({ calls }, low, -1, isWanted);
  const after =
    low < calls.length && isWanted(calls[low]!) ? low : stepIn({ calls }, low, 1, isWanted);
  if (before < 0 || after < 0) return Math.max(before, after);
  return x - xs[calls[before]!]! <= xs[calls[after]!]! - x ? before : after;
}

/** The next place before or after one whose call is wanted; -1 where there is none. */
export function stepIn(
  { calls }: Pick<Lane, "calls">,
  place: number,
  step: 1 | -1,
  isWanted: (row: number) => boolean,
): number {
  for (let at = place + step; at >= 0 && at < calls.length; at += step) {
    if (isWanted(calls[at]!)) return at;
  }
  return -1;
}

const MIN_SHARE = 1e-5;

/** Less or more around a point that stays where it is, within what there is. */
export function zoom(view: Range, whole: Range, factor: number, around: number): Range {
  const size = (view.high - view.low) * factor;
  const least = (whole.high - whole.low) * MIN_SHARE;
  const next = Math.min(Math.max(size, least), whole.high - whole.low);
  const share = (around - view.low) / (view.high - view.low);
  return keepWithin({ low: around - share * next, high: around + (1 - share) * next }, whole);
}

export function pan(view: Range, whole: Range, by: number): Range {
  return keepWithin({ low: view.low + by, high: view.high + by }, whole);
}

/** The same stretch where the point is in sight, else one that has it in its middle. */
export function bring(view: Range, whole: Range, point: number): Range {
  if (point >= view.low && point <= view.high) return view;
  return pan(view, whole, point - (view.low + view.high) / 2);
}

function keepWithin({ low, high }: Range, whole: Range): Range {
  const size = Math.min(high - low, whole.high - whole.low);
  const start = Math.min(Math.max(low, whole.low), whole.high - size);
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

/** Round figures in sight, told to as many digits as keep them apart. */
export function makeMoments({ low, high }: Range, along: Along, count = 6): Tick[] {
  const step = Math.max(makeTicks(high - low, count)[1] ?? 1, along === "order" ? 1 : 0);
  const first = Math.ceil(low / step);
  const number = Math.max(Math.floor(high / step) - first + 1, 0);
  const ticks = Array.from({ length: number }, (_, i) => (first + i) * step);
  if (along === "order") return ticks.map((at) => ({ at, text: formatNumber(at) }));
  const [unit, size] = UNITS.find(([, one]) => high >= one) ?? UNITS.at(-1)!;
  const digits = Math.max(Math.ceil(-Math.log10(step / size) - 1e-9), 0);
  return ticks.map((at) => ({ at, text: `${toFixed(at / size, digits)} ${unit}` }));
}
