/** Draws lanes on a canvas: named stretches above, collectives as bars below them. */
import type { Communication } from "../../page";
import { fontOf } from "../../parts/canvas";
import { resolveColor } from "../../parts/colors";
import { makeMoments } from "./lanes";
import { labelStep } from "./mesh";
import type { Scene } from "./scene";

const MAX_MARK = 3; // pixels of the mark that each collective has, whatever it sends
const NUM_SERIES = 8;
const NAME_PIXELS = 7; // of a letter

export function paint(
  context: CanvasRenderingContext2D,
  communication: Communication,
  scene: Scene,
): void {
  const { frame } = scene;
  context.font = fontOf(0.8);
  paintLanes(context, scene);
  context.save();
  context.beginPath();
  context.rect(frame.left, 0, frame.width - frame.left, frame.height);
  context.clip();
  paintMoments(context, scene);
  paintSpans(context, communication, scene);
  // Those that are not looked at first, in grey, so that the others stand above them.
  paintCalls(context, communication, scene, false);
  paintCalls(context, communication, scene, true);
  context.restore();
}

function paintLanes(context: CanvasRenderingContext2D, { lanes, frame }: Scene): void {
  const { left, top, width, laneHeight } = frame;
  const step = labelStep(lanes.all.length, laneHeight, 15);
  const ground = resolveColor("--sunken");
  const quiet = resolveColor("--text-3");
  context.textAlign = "right";
  context.fillStyle = quiet;
  context.textBaseline = "alphabetic";
  context.fillText("rank", left - 8, top - 7);
  context.textBaseline = "middle";
  lanes.all.forEach(({ label }, i) => {
    const y = top + i * laneHeight;
    context.fillStyle = ground;
    context.fillRect(left, y, width - left, laneHeight - 1);
    context.fillStyle = quiet;
    if (i % step) return;
    context.fillText(clipText(context, label, left - 8), left - 8, y + laneHeight / 2);
  });
}

function paintMoments(context: CanvasRenderingContext2D, { lanes, view, frame }: Scene): void {
  const count = Math.max(Math.floor((frame.width - frame.left) / 110), 2);
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  for (const { at, text } of makeMoments(view, lanes.along, count)) {
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
  { lanes, frame }: Scene,
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

function clipText(context: CanvasRenderingContext2D, text: string, room: number): string {
  if (context.measureText(text).width <= room) return text;
  return `${text.slice(0, Math.max(Math.floor(room / NAME_PIXELS) - 1, 1))}…`;
}

function paintCalls(
  context: CanvasRenderingContext2D,
  { calls: { kind, wire_bytes } }: Communication,
  { lanes, marks, frame }: Scene,
  isMarked: boolean,
): void {
  const most = wire_bytes.reduce((a, b) => Math.max(a, b), 1);
  const colors = listColors();
  const room = frame.laneHeight - frame.spanHeight - 2;
  const mark = Math.min(MAX_MARK, Math.max(room / 6, 1));
  const width = frame.callWidth;
  let last = -1;
  context.fillStyle = resolveColor("--line-strong");
  lanes.all.forEach(({ calls }, i) => {
    const bottom = frame.top + (i + 1) * frame.laneHeight - 1;
    for (const row of calls) {
      const x = frame.x(lanes.xs[row]!);
      if (Boolean(marks[row]) !== isMarked || x < frame.left - width || x > frame.width) continue;
      if (isMarked && kind[row] !== last) {
        last = kind[row]!;
        context.fillStyle = colors[last % NUM_SERIES]!;
      }
      const height = heightOfCall(wire_bytes[row]!, most, room - mark - 1);
      context.fillRect(x - width / 2, bottom - mark, width, mark);
      context.fillRect(x - width / 2, bottom - mark - 1 - height, width, height);
    }
  });
}

/** Pixels of a bar: proportional to what the collective sends, and none for nothing. */
export function heightOfCall(numBytes: number, most: number, room: number): number {
  return most > 0 ? (room * numBytes) / most : 0;
}

function listColors(): string[] {
  return Array.from({ length: NUM_SERIES }, (_, i) => resolveColor(`--series-${i + 1}`));
}
