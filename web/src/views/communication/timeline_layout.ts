/** Layout of the timeline in pixels: finds the call under the pointer and handles arrow keys. */
import type { Spans } from "../../page";
import { makeScale, type Scale } from "../../parts/scale";
import { findFirstAt, findNearestCall, findNextCall, type Lane, type Lanes } from "./lanes";
import type { Range } from "./ranges";

const MAX_DISTANCE = 8; // pixels between the pointer and a call that it selects
const MAX_CALL = 16;
const MAX_LABEL = 22; // letters
const BASE_REM = 14; // pixels of a rem on a standard screen

/** Positions and sizes in pixels. */
export interface Frame {
  readonly left: number;
  readonly rulerHeight: number; // of ticks and marks of steps
  readonly bandHeight: number; // of phases above the lanes; 0 if each lane has its own
  readonly headSpanHeight: number; // of spans above the lanes
  readonly top: number; // of the first lane
  readonly width: number;
  readonly height: number;
  readonly laneHeight: number;
  readonly spanHeight: number; // of all levels of nested spans, in each lane
  readonly callWidth: number;
  readonly x: Scale;
}

export interface TimelineLayout {
  readonly lanes: Lanes;
  readonly view: Range; // the visible range
  readonly matches: Uint8Array; // 1 for calls that match the filter
  readonly frame: Frame;
}

/** A call, by its lane and its index in the lane. */
export interface LanePosition {
  readonly lane: number;
  readonly index: number;
}

export function makeFrame(lanes: Lanes, view: Range, width: number, rem: number): Frame {
  const unit = rem / BASE_REM;
  const longest = lanes.all.reduce((max, { label }) => Math.max(max, label.length), 4);
  const maxLeft = 0.3 * width;
  const left = Math.min((14 + 7 * Math.min(longest, MAX_LABEL)) * unit, maxLeft);
  const rulerHeight = 26 * unit;
  const hasSingleRank = lanes.rank >= 0;
  const bandHeight = hasSingleRank ? 22 * unit : 0;
  const levels = Math.min(lanes.depth, 3);
  const headSpanHeight = lanes.headSpans.length ? levels * 18 * unit : 0;
  const top = rulerHeight + bandHeight + headSpanHeight;
  const numLanes = Math.max(lanes.all.length, 1);
  const maxLaneHeight = (hasSingleRank && numLanes <= 3 ? 96 : numLanes <= 6 ? 72 : 48) * unit;
  const laneHeight = Math.max(Math.min(Math.floor((460 * unit) / numLanes), maxLaneHeight), 5);
  const callWidth = findCallWidth(lanes, view, width - left);
  // Half a call on both sides, so that the first and the last call are not clipped.
  const edge = callWidth / 2 + 1;
  return {
    left,
    rulerHeight,
    bandHeight,
    headSpanHeight,
    top,
    width,
    height: top + numLanes * laneHeight,
    laneHeight,
    spanHeight: hasSingleRank ? 0 : Math.min(0.45 * laneHeight, 17 * unit * levels),
    callWidth,
    x: makeScale([view.low, view.high], [left + edge, Math.max(width - edge, left + edge + 1)]),
  };
}

/** By order each call has a slot that it may fill; by time it is a thin line. */
function findCallWidth({ xAxis }: Lanes, { low, high }: Range, maxWidth: number): number {
  if (xAxis === "time") return 2;
  return Math.min(Math.max((0.75 * maxWidth) / (high - low + 1), 1), MAX_CALL);
}

/** A bar of the timeline: a call, or the largest of the calls that share a pixel. */
export interface Bar {
  readonly row: number;
  readonly x: number; // its middle
}

/** Bars of a lane in the visible range, at most one for each pixel. */
export function listBars(
  { calls }: Pick<Lane, "calls">,
  { lanes, frame, view, matches }: TimelineLayout,
  wireBytes: readonly number[],
  isMatch: boolean,
): Bar[] {
  const { xs } = lanes;
  const margin = frame.callWidth / 2 / Math.max(frame.x(view.low + 1) - frame.x(view.low), 1e-9);
  const bars: { row: number; x: number }[] = [];
  let last: { row: number; x: number } | null = null;
  for (let i = findFirstAt(calls, xs, view.low - margin); i < calls.length; i++) {
    const row = calls[i]!;
    if (xs[row]! > view.high + margin) break;
    if (Boolean(matches[row]) !== isMatch) continue;
    const x = frame.x(xs[row]!);
    if (last && x - last.x < 1) {
      if (wireBytes[row]! > wireBytes[last.row]!) last.row = row;
      continue;
    }
    last = { row, x };
    bars.push(last);
  }
  return bars;
}

export type HeightScale = "linear" | "log";

/** Height of a bar in pixels: proportional to the bytes sent, or to their logarithm. */
export function barHeight(
  numBytes: number,
  max: number,
  maxHeight: number,
  scale: HeightScale = "linear",
): number {
  if (max <= 0 || numBytes <= 0) return 0;
  if (scale === "linear") return (maxHeight * numBytes) / max;
  return (maxHeight * Math.log2(1 + numBytes)) / Math.log2(1 + max);
}

export function rowAt({ lanes }: TimelineLayout, position: LanePosition | null): number {
  return position ? (lanes.all[position.lane]?.calls[position.index] ?? -1) : -1;
}

/** The call nearest to a point, if a call that matches the filter is close enough. */
export function findCallAt(
  { lanes, matches, frame }: TimelineLayout,
  x: number,
  y: number,
): LanePosition | null {
  const lane = Math.floor((y - frame.top) / frame.laneHeight);
  const laneFound = lanes.all[lane];
  if (!laneFound || x < frame.left) return null;
  const index = findNearestCall(
    laneFound,
    lanes.xs,
    frame.x.invert(x),
    (row) => matches[row] === 1,
  );
  if (index < 0) return null;
  const distance = Math.abs(frame.x(lanes.xs[laneFound.calls[index]!]!) - x);
  return distance <= Math.max(MAX_DISTANCE, frame.callWidth) ? { lane, index } : null;
}

/** Row of the span at a point; -1 if there is none. */
export function findSpanAt(layout: TimelineLayout, spans: Spans, x: number, y: number): number {
  const { lanes, frame } = layout;
  if (!lanes.depth || x < frame.left) return -1;
  const lane = Math.floor((y - frame.top) / frame.laneHeight);
  const isHead = y < frame.top;
  const height = isHead ? frame.headSpanHeight : frame.spanHeight;
  const top = isHead ? frame.top - frame.headSpanHeight : frame.top + lane * frame.laneHeight;
  const within = y - top;
  if (within < 0 || within >= height) return -1;
  const depth = Math.floor((within / height) * lanes.depth);
  const moment = frame.x.invert(x);
  const rows = isHead ? lanes.headSpans : lanes.all[lane]?.spans;
  const spanRow = rows?.find((row) => {
    const start = spans.start_ns[row]!;
    const isDuring = moment >= start && moment <= start + spans.duration_ns[row]!;
    return isDuring && spans.depth[row] === depth;
  });
  return spanRow ?? -1;
}

/** The call that a key moves to: along a lane, or to the nearest call of another lane. */
export function moveByKey(
  layout: TimelineLayout,
  position: LanePosition | null,
  key: string,
): LanePosition | null {
  const { lanes, matches } = layout;
  const isMatch = (row: number): boolean => matches[row] === 1;
  const moveAlong = (lane: number, from: number, step: 1 | -1): LanePosition | null => {
    const index = lanes.all[lane] ? findNextCall(lanes.all[lane], from, step, isMatch) : -1;
    return index < 0 ? position : { lane, index };
  };
  const moveAcross = (step: 1 | -1): LanePosition | null => {
    const x = lanes.xs[rowAt(layout, position)] ?? layout.view.low;
    for (let lane = position ? position.lane + step : 0; lanes.all[lane]; lane += step) {
      const index = findNearestCall(lanes.all[lane]!, lanes.xs, x, isMatch);
      if (index >= 0) return { lane, index };
    }
    return position;
  };
  const lane = position?.lane ?? 0;
  const actions: Readonly<Record<string, () => LanePosition | null>> = {
    ArrowRight: () => (position ? moveAlong(lane, position.index, 1) : moveAcross(1)),
    ArrowLeft: () => (position ? moveAlong(lane, position.index, -1) : moveAcross(1)),
    ArrowUp: () => moveAcross(-1),
    ArrowDown: () => moveAcross(1),
    Home: () => moveAlong(lane, -1, 1),
    End: () => moveAlong(lane, lanes.all[lane]?.calls.length ?? 0, -1),
  };
  return actions[key]?.() ?? null;
}

/** Bytes sent in each pixel column of the minimap, by phase. */
export function sumColumns(
  lanes: Lanes,
  {
    phase,
    wire_bytes,
  }: { readonly phase: readonly number[]; readonly wire_bytes: readonly number[] },
  numColumns: number,
  numPhases: number,
): Float64Array[] {
  const { low, high } = lanes.range;
  const columns = Array.from({ length: numPhases }, () => new Float64Array(numColumns));
  for (const { calls } of lanes.all) {
    for (const row of calls) {
      const share = (lanes.xs[row]! - low) / (high - low);
      const column = Math.min(Math.floor(share * numColumns), numColumns - 1);
      columns[phase[row]!]![column]! += wire_bytes[row]!;
    }
  }
  return columns;
}
