/** Draws an icicle chart on a canvas. */
import { clipText, makeFont } from "../../parts/canvas";
import { resolveColor, resolveSeries } from "../../parts/colors";
import type { Box } from "./icicle_layout";

/** A part of a box, from left to right, in the colour of a series. */
export interface Segment {
  readonly series: number; // -1 is grey
  readonly share: number;
}

export interface BoxStyle {
  readonly segments: readonly Segment[];
  readonly strength: number; // from 0 to 1, of the colour
  readonly name: string;
  readonly figures: readonly string[]; // the longest that fits is drawn
  readonly isFaded: boolean;
  readonly isAncestor: boolean; // of the zoomed module
  readonly isHatched: boolean;
}

const GAP = 1; // pixels between boxes
const PADDING = 0.45; // rem
const TINT = 0.42; // opacity of the strongest colour, on which text is readable
const FADED = 0.28;
const EDGE = 3; // pixels of the full colour below the tint

interface Palette {
  readonly series: readonly string[];
  readonly surface: string;
  readonly sunken: string;
  readonly text: string;
  readonly muted: string;
  readonly line: string;
}

export function paintIcicle(
  context: CanvasRenderingContext2D,
  boxes: readonly Box[],
  styleOf: (box: Box) => BoxStyle,
  { rowHeight, rem }: { readonly rowHeight: number; readonly rem: number },
): void {
  const palette = {
    series: resolveSeries(),
    surface: resolveColor("--surface"),
    sunken: resolveColor("--sunken"),
    text: resolveColor("--text"),
    muted: resolveColor("--text-2"),
    line: resolveColor("--line-strong"),
  };
  context.font = makeFont(0.88);
  context.textBaseline = "middle";
  for (const box of boxes) {
    const style = styleOf(box);
    const area = {
      x: box.x,
      y: box.depth * rowHeight,
      width: Math.max(box.width - GAP, 1),
      height: rowHeight - 2,
    };
    context.globalAlpha = style.isFaded ? FADED : 1;
    paintBox(context, area, style, palette);
    paintLabel(context, area, style, palette, PADDING * rem);
  }
  context.globalAlpha = 1;
}

interface Area {
  readonly x: number;
  readonly y: number;
  readonly width: number;
  readonly height: number;
}

function paintBox(
  context: CanvasRenderingContext2D,
  { x, y, width, height }: Area,
  style: BoxStyle,
  { series, sunken, surface, line }: Palette,
): void {
  const alpha = context.globalAlpha;
  context.fillStyle = sunken;
  context.fillRect(x, y, width, height);
  let left = x;
  for (const segment of style.segments) {
    const segmentWidth = width * segment.share;
    context.fillStyle = series.at(segment.series)!;
    context.globalAlpha = alpha * (style.isAncestor ? 0.16 : TINT * style.strength);
    context.fillRect(left, y, segmentWidth, height);
    context.globalAlpha = alpha * (style.isAncestor ? 0.5 : 1);
    if (width > 2 * EDGE) context.fillRect(left, y + height - EDGE, segmentWidth, EDGE);
    left += segmentWidth;
  }
  context.globalAlpha = alpha;
  if (style.isHatched) paintHatching(context, { x, y, width, height }, surface);
  if (style.segments.length) return;
  context.strokeStyle = line;
  context.strokeRect(x + 0.5, y + 0.5, Math.max(width - 1, 0), height - 1);
}

function paintHatching(
  context: CanvasRenderingContext2D,
  { x, y, width, height }: Area,
  color: string,
): void {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = color;
  context.lineWidth = 2;
  context.beginPath();
  for (let offset = -height; offset < width; offset += 8) {
    context.moveTo(x + offset, y + height);
    context.lineTo(x + offset + height, y);
  }
  context.stroke();
  context.restore();
}

/** The name at the left and, where there is room beside it, a figure at the right. */
function paintLabel(
  context: CanvasRenderingContext2D,
  { x, y, width, height }: Area,
  { name, figures, isAncestor }: BoxStyle,
  { text, muted }: Palette,
  padding: number,
): void {
  const room = width - 2 * padding;
  const shownName = clipText(context, name, room);
  if (!shownName) return;
  const middle = y + (height - EDGE) / 2 + 1;
  context.textAlign = "left";
  context.fillStyle = isAncestor ? muted : text;
  context.fillText(shownName, x + padding, middle);
  const rest = room - context.measureText(shownName).width - 1.4 * padding;
  const figure = figures.find((candidate) => context.measureText(candidate).width <= rest);
  if (!figure || shownName !== name) return;
  context.textAlign = "right";
  context.fillText(figure, x + width - padding, middle);
}
