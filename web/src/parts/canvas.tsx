/** A canvas with the screen's resolution that is redrawn when the theme changes. */
import { useLayoutEffect, useRef } from "preact/hooks";
import { theme } from "../store/theme";

type Draw = (context: CanvasRenderingContext2D) => void;

interface Props {
  readonly width: number; // in CSS pixels
  readonly height: number;
  readonly draw: Draw; // memoise it: a new function redraws
}

const drawings = new WeakMap<Element, Draw>();

/** What draws a canvas, for exports that draw it again. */
export function findDrawing(canvas: Element): Draw | undefined {
  return drawings.get(canvas);
}

export function Canvas({ width, height, draw }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const currentTheme = theme.value;
  // Redraw with the colours of another theme.
  useLayoutEffect(() => {
    const context = canvas.current?.getContext("2d");
    if (!canvas.current || !context) return;
    const ratio = devicePixelRatio || 1;
    canvas.current.width = Math.round(width * ratio);
    canvas.current.height = Math.round(height * ratio);
    context.scale(ratio, ratio);
    draw(context);
    drawings.set(canvas.current, draw);
  }, [width, height, draw, currentTheme]);
  return (
    <canvas ref={canvas} class="canvas" style={{ width: `${width}px`, height: `${height}px` }} />
  );
}

/** Pixels of a rem, which grows with the screen. */
export function remPixels(): number {
  return Number.parseFloat(getComputedStyle(document.documentElement).fontSize) || 14;
}

/** The page's font in a size in rem, for text on a canvas. */
export function makeFont(rem: number): string {
  return `${rem * remPixels()}px ${getComputedStyle(document.body).fontFamily}`;
}

/** The text, its beginning with an ellipsis, or nothing if not even two letters fit. */
export function clipText(
  context: Pick<CanvasRenderingContext2D, "measureText">,
  text: string,
  room: number,
): string {
  if (room <= 0) return "";
  if (context.measureText(text).width <= room) return text;
  let low = 0;
  let high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle;
    else high = middle - 1;
  }
  return low >= 2 ? `${text.slice(0, low)}…` : "";
}
