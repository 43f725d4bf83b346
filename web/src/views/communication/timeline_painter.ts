/** Draws the timeline on a canvas: spans at the top of each lane, collectives as bars below them. */
import type { Communication } from "../../page";
import { makeFont } from "../../parts/canvas";
import { resolveColor } from "../../parts/colors";
import { makeTimelineTicks } from "./lanes";
import { labelStep } from "./mesh";
import type { TimelineLayout } from "./timeline_layout";

const MAX_MARK = 3; // pixels of the mark that every collective has, even if it sends nothing
const NUM_SERIES = 8;
const NAME_PIXELS = 7; // width of a letter

export function paint(
  context: CanvasRenderingContext2D,
  communication: Communication,
  layout: TimelineLayout,
): void {
  const { frame } = layout;
  context.font = makeFont(0.8);
  paintLanes(context, layout);
  context.save();
  context.beginPath();
  context.rect(frame.left, 0, frame.width - frame.left, frame.height);
  context.clip();
  paintTicks(context, layout);
  paintSpans(context, communication, layout);
  // Calls that do not match the filter are drawn first, in grey, below the others.
  paintCalls(context, communication, layout, false);
  paintCalls(context, communication, layout, true);
  context.restore();
}

function paintLanes(context: CanvasRenderingContext2D, { lanes, frame }: TimelineLayout): void {
  const { left, top, width, laneHeight } = frame;
  const step = labelStep(lanes.all.length, laneHeight, 15);
  const background = resolveColor("--sunken");
  const mutedText = resolveColor("--text-3");
  context.textAlign = "right";
  context.fillStyle = mutedText;
  context.textBaseline = "alphabetic";
  context.fillText("rank", left - 8, top - 7);
  context.textBaseline = "middle";
  lanes.all.forEach(({ label }, i) => {
    const y = top + i * laneHeight;
    context.fillStyle = background;
    context.fillRect(left, y, width - left, laneHeight - 1);
    context.fillStyle = mutedText;
    if (i % step) return;
    context.fillText(clipText(context, label, left - 8), left - 8, y + laneHeight / 2);
  });
}

function paintTicks(
  context: CanvasRenderingContext2D,
  { lanes, view, frame }: TimelineLayout,
): void {
  const count = Math.max(Math.floor((frame.width - frame.left) / 110), 2);
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  for (const { at, text } of makeTimelineTicks(view, lanes.xAxis, count)) {
    const x = Math.round(frame.x(at)) + 0.5;
    context.fillStyle = resolveColor("--line");
    context.fillRect(x, 4, 1, frame.height - 4);
    context.fillStyle = resolveColor("--text-3");
    context.fillText(text, x + 5, frame.top - 7);
  }
}

function paintSpans(
  context: CanvasRenderingContext2D,
  { spans }: Communication,
  { lanes, frame }: TimelineLayout,
): void {
  if (!lanes.depth) return;
  const level = frame.spanHeight / lanes.depth;
  const fill = resolveColor("--bar");
  const text = resolveColor("--text");
  context.textAlign = "left";
  context.textBaseline = "middle";
  lanes.all.forEach((lane, i) => {
    for (const row of lane.spans) {
      const depth = spans.depth[row]!;
      const start = frame.x(spans.start_ns[row]!);
      const end = frame.x(spans.start_ns[row]! + spans.duration_ns[row]!);
      if (depth >= lanes.depth || end < frame.left || start > frame.width) continue;
      const y = frame.top + i * frame.laneHeight + depth * level;
      context.fillStyle = fill;
      context.fillRect(start, y, Math.max(end - start - 1, 1), Math.max(level - 1, 1));
      const from = Math.max(start, frame.left) + 4;
      const name = spans.names[spans.name[row]!]!;
      if (level < 13 || end - from < NAME_PIXELS * Math.min(name.length, 8)) continue;
      context.fillStyle = text;
      context.fillText(clipText(context, name, end - from - 4), from, y + level / 2);
    }
  });
}

function clipText(context: CanvasRenderingContext2D, text: string, maxWidth: number): string {
  if (context.measureText(text).width <= maxWidth) return text;
  return `${text.slice(0, Math.max(Math.floor(maxWidth / NAME_PIXELS) - 1, 1))}…`;
}

function paintCalls(
  context: CanvasRenderingContext2D,
  { calls: { kind, wire_bytes } }: Communication,
  { lanes, matches, frame }: TimelineLayout,
  isMatch: boolean,
): void {
  const max = wire_bytes.reduce((a, b) => Math.max(a, b), 1);
  const colors = listColors();
  const maxHeight = frame.laneHeight - frame.spanHeight - 2;
  const mark = Math.min(MAX_MARK, Math.max(maxHeight / 6, 1));
  const width = frame.callWidth;
  let lastKind = -1;
  context.fillStyle = resolveColor("--line-strong");
  lanes.all.forEach(({ calls }, i) => {
    const bottom = frame.top + (i + 1) * frame.laneHeight - 1;
    for (const row of calls) {
      const x = frame.x(lanes.xs[row]!);
      if (Boolean(matches[row]) !== isMatch || x < frame.left - width || x > frame.width) continue;
      if (isMatch && kind[row] !== lastKind) {
        lastKind = kind[row]!;
        context.fillStyle = colors[lastKind % NUM_SERIES]!;
      }
      const height = barHeight(wire_bytes[row]!, max, maxHeight - mark - 1);
      context.fillRect(x - width / 2, bottom - mark, width, mark);
      context.fillRect(x - width / 2, bottom - mark - 1 - height, width, height);
    }
  });
}

/** Height of a bar in pixels, proportional to the bytes sent. */
export function barHeight(numBytes: number, max: number, maxHeight: number): number {
  return max > 0 ? (maxHeight * numBytes) / max : 0;
}

function listColors(): string[] {
  return Array.from({ length: NUM_SERIES }, (_, i) => resolveColor(`--series-${i + 1}`));
}
