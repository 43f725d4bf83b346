/** What a timeline shows and where: measures in pixels, what is under the pointer, where keys lead. */
import type { Spans } from "../../page";
import { makeScale, type Scale } from "../../parts/scale";
import { type Lanes, nearestIn, type Range, stepIn } from "./lanes";

const NEAR = 8; // pixels within which the pointer finds a call
const MAX_CALL = 16;
const MAX_LABEL = 12; // letters
const BASE_REM = 14; // pixels of a rem on an ordinary screen

/** Where things are, in pixels. */
export interface Frame {
  readonly left: number;
  readonly top: number;
  readonly width: number;
  readonly height: number;
  readonly laneHeight: number;
  readonly spanHeight: number; // of all levels of spans together
  readonly callWidth: number;
  readonly x: Scale;
}

export interface Scene {
  readonly lanes: Lanes;
  readonly view: Range; // what is in sight
  readonly marks: Uint8Array; // of calls that are looked at
  readonly frame: Frame;
}

/** A call, by its lane and its place there. */
export interface Place {
  readonly lane: number;
  readonly place: number;
}

export function makeFrame(lanes: Lanes, view: Range, width: number, rem: number): Frame {
  const unit = rem / BASE_REM;
  const longest = lanes.all.reduce((most, { label }) => Math.max(most, label.length), 4);
  const [left, top] = [(12 + 7 * Math.min(longest, MAX_LABEL)) * unit, 26 * unit];
  const number = Math.max(lanes.all.length, 1);
  const tallest = (number <= 4 ? 90 : 56) * unit;
  const laneHeight = Math.max(Math.min(Math.floor((440 * unit) / number), tallest), 5);
  const callWidth = widthOfCall(lanes, view, width - left);
  // Half a call on both sides, so that the first and the last are not cut.
  const edge = callWidth / 2 + 1;
  return {
    left,
    top,
    width,
    height: top + number * laneHeight,
    laneHeight,
    spanHeight: Math.min(0.45 * laneHeight, 17 * unit * lanes.depth),
    callWidth,
    x: makeScale([view.low, view.high], [left + edge, Math.max(width - edge, left + edge + 1)]),
  };
}

/** In order each has a place of its own, which it may fill; in time it is a moment. */
function widthOfCall({ along }: Lanes, { low, high }: Range, room: number): number {
  if (along === "time") return 2;
  return Math.min(Math.max((0.75 * room) / (high - low + 1), 1), MAX_CALL);
}

export function rowOf({ lanes }: Scene, at: Place | null): number {
  return at ? (lanes.all[at.lane]?.calls[at.place] ?? -1) : -1;
}

/** The call at a point, if one that is looked at is near. */
export function findAt({ lanes, marks, frame }: Scene, x: number, y: number): Place | null {
  const lane = Math.floor((y - frame.top) / frame.laneHeight);
  const found = lanes.all[lane];
  if (!found || x < frame.left) return null;
  const place = nearestIn(found, lanes.xs, frame.x.invert(x), (row) => marks[row] === 1);
  if (place < 0) return null;
  const distance = Math.abs(frame.x(lanes.xs[found.calls[place]!]!) - x);
  return distance <= Math.max(NEAR, frame.callWidth) ? { lane, place } : null;
}

/** The named stretch at a point; -1 where there is none. */
export function findSpanAt({ lanes, frame }: Scene, spans: Spans, x: number, y: number): number {
  const lane = Math.floor((y - frame.top) / frame.laneHeight);
  const within = y - frame.top - lane * frame.laneHeight;
  if (!lanes.depth || x < frame.left || within >= frame.spanHeight) return -1;
  const depth = Math.floor((within / frame.spanHeight) * lanes.depth);
  const moment = frame.x.invert(x);
  const found = lanes.all[lane]?.spans.find((row) => {
    const start = spans.start_ns[row]!;
    const isThen = moment >= start && moment <= start + spans.duration_ns[row]!;
    return isThen && spans.depth[row] === depth;
  });
  return found ?? -1;
}

/** Where a key leads: along a lane from call to call, or to the nearest one of another lane. */
export function walk(scene: Scene, at: Place | null, key: string): Place | null {
  const { lanes, marks } = scene;
  const isWanted = (row: number): boolean => marks[row] === 1;
  const along = (lane: number, from: number, step: 1 | -1): Place | null => {
    const place = lanes.all[lane] ? stepIn(lanes.all[lane], from, step, isWanted) : -1;
    return place < 0 ? at : { lane, place };
  };
  const across = (step: 1 | -1): Place | null => {
    const x = lanes.xs[rowOf(scene, at)] ?? scene.view.low;
    for (let lane = at ? at.lane + step : 0; lanes.all[lane]; lane += step) {
      const place = nearestIn(lanes.all[lane]!, lanes.xs, x, isWanted);
      if (place >= 0) return { lane, place };
    }
    return at;
  };
  const lane = at?.lane ?? 0;
  const moves: Readonly<Record<string, () => Place | null>> = {
    ArrowRight: () => (at ? along(lane, at.place, 1) : across(1)),
    ArrowLeft: () => (at ? along(lane, at.place, -1) : across(1)),
    ArrowUp: () => across(-1),
    ArrowDown: () => across(1),
    Home: () => along(lane, -1, 1),
    End: () => along(lane, lanes.all[lane]?.calls.length ?? 0, -1),
  };
  return moves[key]?.() ?? null;
}
