/** Lanes of the timeline: collectives by axis or module of one rank, or by rank. */
import type { Communication } from "../../page";
import type { Range, XAxis } from "./ranges";

/** `ranks` has a lane for every rank, `alike` for every set of identical ranks. */
export type LaneKind = "axis" | "module" | "ranks" | "alike";

export interface Lane {
  readonly rank: number;
  readonly label: string;
  readonly calls: Int32Array; // from left to right
  readonly spans: readonly number[]; // rows of spans that are drawn in this lane
  readonly bands: readonly PhaseBand[]; // phases of its rank
}

/** Consecutive collectives of one phase, on the x axis. */
export interface PhaseBand extends Range {
  readonly phase: number;
}

export interface Lanes {
  readonly kind: LaneKind;
  readonly all: readonly Lane[];
  readonly rank: number; // whose collectives all lanes have; -1 if lanes are ranks
  readonly xs: readonly number[]; // position of each call on the x axis
  readonly xAxis: XAxis;
  readonly range: Range; // of all calls and spans
  readonly depth: number; // nesting depth of spans
  readonly headSpans: readonly number[]; // spans of `rank`, above the lanes
  readonly headBands: readonly PhaseBand[]; // phases of `rank`, above the lanes
  readonly numLeftOut: number; // lanes that are not drawn, above the limit
}

const MAX_LANES = 128;
const MAX_MODULES = 12;
const MAX_DEPTH = 3;

/** Whether times were recorded: collectives of a simulated world have none. */
export function hasTimes({ calls, spans }: Communication): boolean {
  return calls.rank.length ? calls.start_ns.length > 0 : spans.rank.length > 0;
}

interface LaneInput {
  readonly communication: Communication;
  readonly xAxis: XAxis;
  readonly kind: LaneKind;
  readonly rank: number; // for lanes of one rank
  readonly nameModule: (position: number) => string; // identical layers have the same name
}

interface LaneRows {
  readonly label: string;
  readonly rank: number;
  readonly calls: number[];
  readonly spans: number[];
}

export function makeLanes(input: LaneInput): Lanes {
  const { communication, xAxis, kind, rank } = input;
  const { calls, spans } = communication;
  const hasSingleRank = (kind === "axis" || kind === "module") && calls.rank.length > 0;
  const xs = xAxis === "time" ? calls.start_ns : calls.order;
  const rows = hasSingleRank ? listFacetLanes(input) : listRankLanes(input);
  const maxLanes = kind === "module" ? MAX_MODULES : MAX_LANES;
  const sortCalls = (callRows: readonly number[]): Int32Array =>
    Int32Array.from(callRows).sort((a, b) => xs[a]! - xs[b]! || a - b);
  const findPhases = (sorted: Int32Array): PhaseBand[] => findBands(sorted, calls.phase, xs, xAxis);
  const all = rows.slice(0, maxLanes).map((lane) => {
    const sorted = sortCalls(lane.calls);
    return { ...lane, calls: sorted, bands: hasSingleRank ? [] : findPhases(sorted) };
  });
  const headSpans =
    hasSingleRank && xAxis === "time"
      ? spans.rank.flatMap((spanRank, row) => (spanRank === rank ? [row] : []))
      : [];
  const drawn = [...headSpans, ...all.flatMap((lane) => lane.spans)];
  const depth = drawn.reduce((max, row) => Math.max(max, spans.depth[row]! + 1), 0);
  return {
    kind,
    all,
    rank: hasSingleRank ? rank : -1,
    xs,
    xAxis,
    range: findRange(
      all,
      xs,
      drawn.map((row) => [spans.start_ns[row]!, spans.duration_ns[row]!]),
    ),
    depth: Math.min(depth, MAX_DEPTH),
    headSpans,
    headBands: hasSingleRank ? findPhases(sortCalls(rows.flatMap((lane) => lane.calls))) : [],
    numLeftOut: rows.length - all.length,
  };
}

function listRankLanes({ communication, xAxis, kind, rank }: LaneInput): LaneRows[] {
  const { calls, spans, ranks } = communication;
  const labels = new Map(ranks.map((row) => [row.example, row.ranks]));
  const byRank = new Map<number, LaneRows>();
  const getLane = (ofLane: number): LaneRows => {
    const label = kind === "alike" ? (labels.get(ofLane) ?? "") : String(ofLane);
    const lane = byRank.get(ofLane) ?? { rank: ofLane, label, calls: [], spans: [] };
    byRank.set(ofLane, lane);
    return lane;
  };
  calls.rank.forEach((ofCall, row) => {
    getLane(ofCall).calls.push(row);
  });
  if (xAxis === "time") {
    spans.rank.forEach((ofSpan, row) => {
      getLane(ofSpan).spans.push(row);
    });
  }
  // Without collectives, spans are filtered by the selected rank.
  const isOfRank = (ofLane: number): boolean =>
    rank < 0 || calls.rank.length > 0 || ofLane === rank;
  return [...byRank.values()]
    .filter((lane) => (kind !== "alike" || labels.has(lane.rank)) && isOfRank(lane.rank))
    .sort((a, b) => a.rank - b.rank);
}

/** Axes in the order of the mesh; modules that send most first. */
function listFacetLanes({ communication, kind, rank, nameModule }: LaneInput): LaneRows[] {
  const { calls, axes } = communication;
  const lanes = new Map<string, LaneRows & { numBytes: number; order: number }>();
  calls.rank.forEach((callRank, row) => {
    if (callRank !== rank) return;
    const axis = calls.axis[row]!;
    const label = kind === "axis" ? axes[axis] || "no axis" : nameModule(calls.owner[row]!);
    const lane = lanes.get(label) ?? {
      label,
      rank,
      calls: [],
      spans: [],
      numBytes: 0,
      order: axis,
    };
    lane.calls.push(row);
    lane.numBytes += calls.wire_bytes[row]!;
    lanes.set(label, lane);
  });
  return [...lanes.values()].sort((a, b) =>
    kind === "axis" ? a.order - b.order : b.numBytes - a.numBytes,
  );
}

/** The phases of calls from left to right: a band ends where the next begins. */
export function findBands(
  rows: Int32Array,
  phases: readonly number[],
  xs: readonly number[],
  xAxis: XAxis,
): PhaseBand[] {
  // By order each call has a slot, whose middle is its number.
  const margin = xAxis === "order" ? 0.5 : 0;
  const bands: { phase: number; low: number; high: number }[] = [];
  for (const row of rows) {
    const [phase, x] = [phases[row]!, xs[row]!];
    const last = bands.at(-1);
    if (last) last.high = last.phase === phase ? x + margin : x - margin;
    if (last?.phase !== phase) bands.push({ phase, low: x - margin, high: x + margin });
  }
  return bands;
}

function findRange(
  lanes: readonly Pick<Lane, "calls">[],
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
  { calls }: Pick<Lane, "calls">,
  xs: readonly number[],
  x: number,
  isMatch: (row: number) => boolean,
): number {
  const at = findFirstAt(calls, xs, x);
  const before = findNextCall({ calls }, at, -1, isMatch);
  const after =
    at < calls.length && isMatch(calls[at]!) ? at : findNextCall({ calls }, at, 1, isMatch);
  if (before < 0 || after < 0) return Math.max(before, after);
  return x - xs[calls[before]!]! <= xs[calls[after]!]! - x ? before : after;
}

/** Index of the first call at or after a point. */
export function findFirstAt(calls: Int32Array, xs: readonly number[], x: number): number {
  let low = 0;
  let high = calls.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[calls[middle]!]! < x) low = middle + 1;
    else high = middle;
  }
  return low;
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
