/** Layout of the timeline in pixels: finds the call under the pointer and handles arrow keys. */
import type { Spans } from "../../page";
import { makeScale, type Scale } from "../../parts/scale";
import { findNearestCall, findNextCall, type Lanes, type Range } from "./lanes";

const MAX_DISTANCE = 8; // pixels between the pointer and a call that it selects
const MAX_CALL = 16;
const MAX_LABEL = 12; // letters
const BASE_REM = 14; // pixels of a rem on a standard screen

/** Positions and sizes in pixels. */
export interface Frame {
  readonly left: number;
  readonly top: number;
  readonly width: number;
  readonly height: number;
  readonly laneHeight: number;
  readonly spanHeight: number; // of all levels of nested spans
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
  const [left, top] = [(12 + 7 * Math.min(longest, MAX_LABEL)) * unit, 26 * unit];
  const numLanes = Math.max(lanes.all.length, 1);
  const maxLaneHeight = (numLanes <= 4 ? 90 : 56) * unit;
  const laneHeight = Math.max(Math.min(Math.floor((440 * unit) / numLanes), maxLaneHeight), 5);
  const callWidth = findCallWidth(lanes, view, width - left);
  // Half a call on both sides, so that the first and the last call are not clipped.
  const edge = callWidth / 2 + 1;
  return {
    left,
    top,
    width,
    height: top + numLanes * laneHeight,
    laneHeight,
    spanHeight: Math.min(0.45 * laneHeight, 17 * unit * lanes.depth),
    callWidth,
    x: makeScale([view.low, view.high], [left + edge, Math.max(width - edge, left + edge + 1)]),
  };
}

/** By order each call has a slot that it may fill; by time it is a thin line. */
function findCallWidth({ xAxis }: Lanes, { low, high }: Range, maxWidth: number): number {
  if (xAxis === "time") return 2;
  return Math.min(Math.max((0.75 * maxWidth) / (high - low + 1), 1), MAX_CALL);
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
export function findSpanAt(
  { lanes, frame }: TimelineLayout,
  spans: Spans,
  x: number,
  y: number,
): number {
  const lane = Math.floor((y - frame.top) / frame.laneHeight);
  const within = y - frame.top - lane * frame.laneHeight;
  if (!lanes.depth || x < frame.left || within >= frame.spanHeight) return -1;
  const depth = Math.floor((within / frame.spanHeight) * lanes.depth);
  const moment = frame.x.invert(x);
  const spanRow = lanes.all[lane]?.spans.find((row) => {
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
