/** A canvas that is sharp on every screen, and follows the theme. */
import { useLayoutEffect, useRef } from "preact/hooks";
import { theme } from "../store/theme";

interface Props {
  readonly width: number; // in CSS pixels
  readonly height: number;
  readonly draw: (context: CanvasRenderingContext2D) => void; // memoise it: another one draws anew
}

export function Canvas({ width, height, draw }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const shown = theme.value;
  // Colours are read anew in another theme.
  useLayoutEffect(() => {
    const context = canvas.current?.getContext("2d");
    if (!canvas.current || !context) return;
    const ratio = devicePixelRatio || 1;
    canvas.current.width = Math.round(width * ratio);
    canvas.current.height = Math.round(height * ratio);
    context.scale(ratio, ratio);
    draw(context);
  }, [width, height, draw, shown]);
  return (
    <canvas ref={canvas} class="canvas" style={{ width: `${width}px`, height: `${height}px` }} />
  );
}

/** What a rem is now: it grows with the screen. */
export function remPixels(): number {
  return Number.parseFloat(getComputedStyle(document.documentElement).fontSize) || 14;
}

/** The page's font in a size of its own, for text on a canvas. */
export function fontOf(rem: number): string {
  return `${rem * remPixels()}px ${getComputedStyle(document.body).fontFamily}`;
}
