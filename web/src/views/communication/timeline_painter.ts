/** Draws the timeline on a canvas: phases, spans, and collectives as bars in lanes. */
import type { Communication } from "../../page";
import { clipText, makeFont } from "../../parts/canvas";
import { facetSeries, resolveColor, resolveSeries } from "../../parts/colors";
import type { PhaseBand } from "./lanes";
import { labelStep } from "./mesh";
import { makeTimelineTicks } from "./ranges";
import {
  barHeight,
  type HeightScale,
  listBars,
  sumColumns,
  type TimelineLayout,
} from "./timeline_layout";

const MAX_MARK = 3; // pixels of the mark that every collective has, even if it sends nothing
const BAND_TINT = 0.3; // opacity of a phase above the lanes
const LANE_TINT = 0.09; // and behind the bars
const SPAN_LETTERS = 13; // least height in pixels of a span with a name
const PADDING = 6;
const MINIMAP_COLUMN = 4; // pixels
const MINIMAP_CALLS = 4; // in a column, so that rounding makes no pattern

export function paint(
  context: CanvasRenderingContext2D,
  communication: Communication,
  layout: TimelineLayout,
  scale: HeightScale,
): void {
  const { frame } = layout;
  context.font = makeFont(0.8);
  paintLanes(context, layout);
  context.save();
  context.beginPath();
  context.rect(frame.left, 0, frame.width - frame.left, frame.height);
  context.clip();
  paintBands(context, communication, layout);
  paintTicks(context, layout);
  paintSpans(context, communication, layout);
  // Calls that do not match the filter are drawn first, in grey, below the others.
  paintCalls(context, communication, layout, scale, false);
  paintCalls(context, communication, layout, scale, true);
  paintSteps(context, communication, layout);
  context.restore();
}

function paintLanes(context: CanvasRenderingContext2D, { lanes, frame }: TimelineLayout): void {
  const { left, top, width, laneHeight, rulerHeight, bandHeight, headSpanHeight } = frame;
  const step = labelStep(lanes.all.length, laneHeight, 15);
  const background = resolveColor("--sunken");
  const mutedText = resolveColor("--text-2");
  context.textAlign = "right";
  context.textBaseline = "middle";
  const paintLabel = (label: string, y: number): void => {
    context.fillStyle = mutedText;
    context.fillText(clipText(context, label, left - PADDING - 2), left - PADDING, y);
  };
  if (bandHeight) paintLabel("phase", rulerHeight + bandHeight / 2);
  if (headSpanHeight) paintLabel("spans", top - headSpanHeight / 2);
  if (lanes.rank < 0) paintLabel("rank", rulerHeight / 2);
  lanes.all.forEach(({ label }, i) => {
    const y = top + i * laneHeight;
    context.fillStyle = background;
    context.fillRect(left, y, width - left, laneHeight - 1);
    if (i % step === 0) paintLabel(label, y + laneHeight / 2);
  });
}

/** Phases as a strip above the lanes, with names, and as a tint behind the bars. */
function paintBands(
  context: CanvasRenderingContext2D,
  { phases }: Communication,
  { lanes, frame }: TimelineLayout,
): void {
  const series = resolveSeries();
  const text = resolveColor("--text");
  const { rulerHeight, bandHeight, top, height, laneHeight } = frame;
  const paintBand = (band: PhaseBand, y: number, bandSize: number, opacity: number): void => {
    const start = frame.x(band.low);
    const width = frame.x(band.high) - start;
    if (start > frame.width || start + width < frame.left || width < 0.5) return;
    context.globalAlpha = opacity;
    context.fillStyle = series.at(facetSeries("phase", phases[band.phase]!, band.phase))!;
    context.fillRect(start, y, width, bandSize);
    context.globalAlpha = 1;
  };
  context.textAlign = "left";
  context.textBaseline = "middle";
  for (const band of lanes.headBands) {
    paintBand(band, rulerHeight, bandHeight - 2, BAND_TINT);
    paintBand(band, top, height - top, LANE_TINT);
    const start = Math.max(frame.x(band.low), frame.left) + PADDING;
    const room = Math.min(frame.x(band.high), frame.width) - start - PADDING;
    context.fillStyle = text;
    const name = clipText(context, phases[band.phase]!, room);
    if (name) context.fillText(name, start, rulerHeight + (bandHeight - 2) / 2 + 1);
  }
  lanes.all.forEach(({ bands }, i) => {
    for (const band of bands) paintBand(band, top + i * laneHeight, laneHeight - 1, 2 * LANE_TINT);
  });
}

function paintTicks(
  context: CanvasRenderingContext2D,
  { lanes, view, frame }: TimelineLayout,
): void {
  const count = Math.max(Math.floor((frame.width - frame.left) / 110), 2);
  context.textAlign = "left";
  context.textBaseline = "middle";
  for (const { at, text } of makeTimelineTicks(view, lanes.xAxis, count)) {
    const x = Math.round(frame.x(at)) + 0.5;
    context.fillStyle = resolveColor("--line");
    context.fillRect(x, 4, 1, frame.rulerHeight - 4);
    context.fillRect(x, frame.top, 1, frame.height - frame.top);
    context.fillStyle = resolveColor("--text-3");
    const end = x + 5 + context.measureText(text).width;
    if (end <= frame.width) context.fillText(text, x + 5, frame.rulerHeight / 2);
  }
}

/** Lines where steps begin, on the rank of all lanes or the first lane's. */
function paintSteps(
  context: CanvasRenderingContext2D,
  { steps }: Communication,
  { lanes, frame }: TimelineLayout,
): void {
  const rank = lanes.rank >= 0 ? lanes.rank : lanes.all[0]?.rank;
  const margin = lanes.xAxis === "order" ? 0.5 : 0;
  context.textAlign = "left";
  context.textBaseline = "middle";
  let end = Number.NEGATIVE_INFINITY; // of the last label
  for (const step of steps) {
    if (step.rank !== rank) continue;
    const x = Math.round(frame.x((lanes.xAxis === "time" ? step.start_ns : step.order) - margin));
    if (x < frame.left - 1 || x > frame.width) continue;
    context.fillStyle = resolveColor("--text");
    context.fillRect(x, 0, 1.5, frame.height);
    const width = context.measureText(step.name).width + 2 * PADDING;
    const left = Math.min(x, frame.width - width);
    if (left < end) continue;
    context.fillRect(left, 2, width, frame.rulerHeight - 6);
    context.fillStyle = resolveColor("--surface");
    context.fillText(step.name, left + PADDING, frame.rulerHeight / 2);
    end = left + width;
  }
}

function paintSpans(
  context: CanvasRenderingContext2D,
  communication: Communication,
  { lanes, frame }: TimelineLayout,
): void {
  if (!lanes.depth) return;
  const [fill, text] = [resolveColor("--bar"), resolveColor("--text")];
  const paintRows = (rows: readonly number[], top: number, height: number): void => {
    const area = { lanes, frame, top, height, fill, text };
    for (const row of rows) paintSpan(context, communication, row, area);
  };
  paintRows(lanes.headSpans, frame.top - frame.headSpanHeight, frame.headSpanHeight);
  lanes.all.forEach((lane, i) => {
    paintRows(lane.spans, frame.top + i * frame.laneHeight, frame.spanHeight);
  });
}

interface SpanArea extends Pick<TimelineLayout, "lanes" | "frame"> {
  readonly top: number;
  readonly height: number; // of all levels
  readonly fill: string;
  readonly text: string;
}

function paintSpan(
  context: CanvasRenderingContext2D,
  { spans }: Communication,
  row: number,
  { lanes, frame, top, height, fill, text }: SpanArea,
): void {
  const level = height / lanes.depth;
  const depth = spans.depth[row]!;
  const start = frame.x(spans.start_ns[row]!);
  const end = frame.x(spans.start_ns[row]! + spans.duration_ns[row]!);
  if (depth >= lanes.depth || end < frame.left || start > frame.width) return;
  const y = top + depth * level;
  context.fillStyle = fill;
  context.fillRect(start, y, Math.max(end - start - 1, 1), Math.max(level - 1, 1));
  if (level < SPAN_LETTERS) return;
  const from = Math.max(start, frame.left) + 4;
  context.fillStyle = text;
  context.textAlign = "left";
  context.textBaseline = "middle";
  const name = clipText(context, spans.names[spans.name[row]!]!, end - from - 4);
  if (name) context.fillText(name, from, y + level / 2);
}

function paintCalls(
  context: CanvasRenderingContext2D,
  { calls: { kind, wire_bytes }, kinds }: Communication,
  layout: TimelineLayout,
  scale: HeightScale,
  isMatch: boolean,
): void {
  const { lanes, frame } = layout;
  const max = findMax(wire_bytes);
  const series = resolveSeries();
  const colors = kinds.map((name, i) => series.at(facetSeries("kind", name, i))!);
  const maxHeight = frame.laneHeight - frame.spanHeight - 3;
  const mark = Math.min(MAX_MARK, Math.max(maxHeight / 6, 1));
  const width = frame.callWidth;
  const grey = resolveColor("--line-strong");
  lanes.all.forEach((lane, i) => {
    const bottom = frame.top + (i + 1) * frame.laneHeight - 1;
    for (const { row, x } of listBars(lane, layout, wire_bytes, isMatch)) {
      context.fillStyle = isMatch ? colors[kind[row]!]! : grey;
      const height = barHeight(wire_bytes[row]!, max, maxHeight - mark - 1, scale);
      context.fillRect(x - width / 2, bottom - mark, width, mark);
      context.fillRect(x - width / 2, bottom - mark - 1 - height, width, height);
    }
  });
}

function findMax(values: readonly number[]): number {
  return values.reduce((a, b) => Math.max(a, b), 1);
}

/** The minimap: bytes sent along the full range, stacked by phase. */
export function paintMinimap(
  context: CanvasRenderingContext2D,
  { calls, phases }: Communication,
  { lanes, frame }: TimelineLayout,
  height: number,
): void {
  const series = resolveSeries();
  const width = Math.max(frame.width - frame.left, 1);
  const numCalls = lanes.all.reduce((max, lane) => Math.max(max, lane.calls.length), 0);
  const numColumns = Math.max(
    Math.floor(Math.min(width / MINIMAP_COLUMN, numCalls / MINIMAP_CALLS)),
    1,
  );
  const columns = sumColumns(lanes, calls, numColumns, phases.length);
  const totals = columns[0]!.map((_, at) => columns.reduce((sum, column) => sum + column[at]!, 0));
  const max = totals.reduce((a, b) => Math.max(a, b), 1);
  context.fillStyle = resolveColor("--sunken");
  context.fillRect(frame.left, 0, width, height);
  totals.forEach((total, at) => {
    if (!total) return;
    let y = height;
    columns.forEach((column, phase) => {
      const size = (column[at]! / max) * (height - 2);
      context.fillStyle = series.at(facetSeries("phase", phases[phase]!, phase))!;
      context.fillRect(frame.left + (at * width) / numColumns, y - size, width / numColumns, size);
      y -= size;
    });
  });
}
