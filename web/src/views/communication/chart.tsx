/** The timeline itself, and how it takes the pointer, the wheel and keys. */
import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Communication } from "../../page";
import { Canvas, remPixels } from "../../parts/canvas";
import { useSize } from "../../parts/size";
import { hideTip, showTip } from "../../parts/tooltip";
import { CallTip, describeCall, SpanTip } from "./call";
import { chooseCall, chosen } from "./chosen";
import { bring, type Lanes, pan, type Range, zoom } from "./lanes";
import { paint } from "./paint";
import { findAt, findSpanAt, makeFrame, type Place, rowOf, type Scene, walk } from "./scene";

export const ZOOM_STEP = 0.6;
const DRAG = 5; // pixels from which on a click is a drag

interface Props {
  readonly communication: Communication;
  readonly marks: Uint8Array;
  readonly lanes: Lanes;
  readonly view: Range;
  readonly onView: (view: Range) => void;
}

interface Band {
  readonly from: number;
  readonly to: number;
}

export function Chart({ communication, marks, lanes, view, onView }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const { width } = useSize(box);
  const [at, setAt] = useState<Place | null>(null);
  const [band, setBand] = useState<Band | null>(null);
  const scene = useMemo<Scene>(() => {
    const frame = makeFrame(lanes, view, Math.max(width, 120), remPixels());
    return { lanes, view, marks, frame };
  }, [lanes, view, marks, width]);
  const { frame } = scene;
  const draw = useCallback(
    (context: CanvasRenderingContext2D) => paint(context, communication, scene),
    [communication, scene],
  );
  const row = rowOf(scene, at);
  const choose = (next: number): void => chooseCall(next, { isOnTimeline: true });
  const zoomBy = (factor: number, around: number): void =>
    onView(zoom(view, lanes.range, factor, around));

  useWheel(box, (event) => turn(event, scene, onView));
  const leave = (): void => {
    setAt(null);
    setBand(null);
    hideTip();
  };
  const follow = (event: PointerEvent): void => {
    const { x, y } = placeOf(event);
    if (band) setBand({ from: band.from, to: Math.max(x, frame.left) });
    const span = band ? -1 : findSpanAt(scene, communication.spans, x, y);
    const found = band || span >= 0 ? null : findAt(scene, x, y);
    setAt(found);
    if (span >= 0) showTip(<SpanTip row={span} />, event.clientX, event.clientY);
    else if (found) showTip(<CallTip row={rowOf(scene, found)} />, event.clientX, event.clientY);
    else hideTip();
  };
  const press = (event: PointerEvent): void => {
    const { x } = placeOf(event);
    // A finger scrolls the page.
    if (!event.button && event.pointerType !== "touch" && x >= frame.left) {
      setBand({ from: x, to: x });
    }
  };
  const release = (event: PointerEvent): void => {
    const { x, y } = placeOf(event);
    setBand(null);
    if (band && isWide(band)) onView(rangeOf(band, scene));
    else choose(rowOf(scene, findAt(scene, x, y)));
  };
  const step = (event: KeyboardEvent): void => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const middle = lanes.xs[row] ?? (view.low + view.high) / 2;
    const next = walk(scene, at, event.key);
    if (next) show(next);
    else if (event.key === "+" || event.key === "=") zoomBy(ZOOM_STEP, middle);
    else if (event.key === "-") zoomBy(1 / ZOOM_STEP, middle);
    else if (event.key === "0") onView(lanes.range);
    else if (event.key === "Enter" && row >= 0) choose(row);
    else return;
    event.preventDefault();
  };
  const show = (next: Place): void => {
    const x = lanes.xs[rowOf(scene, next)]!;
    setAt(next);
    const seen = bring(view, lanes.range, x);
    onView(seen);
    const { left, top } = box.current!.getBoundingClientRect();
    const place = makeFrame(lanes, seen, frame.width, remPixels()).x(x);
    const below = top + frame.top + (next.lane + 1) * frame.laneHeight;
    showTip(<CallTip row={rowOf(scene, next)} />, left + place, below);
  };
  return (
    <div
      ref={box}
      class="timeline"
      role="slider"
      tabIndex={0}
      aria-label="timeline of collectives"
      aria-valuemin={0}
      aria-valuemax={Math.max(communication.calls.rank.length - 1, 0)}
      aria-valuenow={Math.max(row, 0)}
      aria-valuetext={row < 0 ? "no collective" : describeCall(row)}
      onPointerMove={follow}
      onPointerDown={press}
      onPointerUp={release}
      onPointerLeave={leave}
      onDblClick={() => onView(lanes.range)}
      onKeyDown={step}
      onBlur={leave}
    >
      {width > 0 && <Canvas width={frame.width} height={frame.height} draw={draw} />}
      <Cursor scene={scene} communication={communication} row={chosen.value.row} isChosen />
      <Cursor scene={scene} communication={communication} row={row} />
      {band && isWide(band) && (
        <div
          class="timeline-band"
          style={{
            left: `${Math.min(band.from, band.to)}px`,
            width: `${Math.abs(band.to - band.from)}px`,
          }}
        />
      )}
    </div>
  );
}

function placeOf(event: PointerEvent): { x: number; y: number } {
  const { left, top } = (event.currentTarget as Element).getBoundingClientRect();
  return { x: event.clientX - left, y: event.clientY - top };
}

function isWide({ from, to }: Band): boolean {
  return Math.abs(to - from) > DRAG;
}

/** What was dragged over, as far as there is anything. */
function rangeOf({ from, to }: Band, { frame, lanes }: Scene): Range {
  const low = frame.x.invert(Math.min(from, to));
  const high = frame.x.invert(Math.max(from, to));
  return zoom({ low, high }, lanes.range, 1, (low + high) / 2);
}

/** Zoom or walk sideways; false leaves the wheel to the page, which people scroll past here. */
function turn(event: WheelEvent, scene: Scene, onView: (view: Range) => void): boolean {
  const { frame, view, lanes } = scene;
  const element = event.currentTarget as Element;
  const isSideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
  const isOurs = event.ctrlKey || event.metaKey || document.activeElement === element;
  if (isSideways) {
    const pixels = event.deltaX || event.deltaY;
    const by = frame.x.invert(frame.left + pixels) - frame.x.invert(frame.left);
    onView(pan(view, lanes.range, by));
    return true;
  }
  if (!isOurs) return false;
  const around = frame.x.invert(event.clientX - element.getBoundingClientRect().left);
  const factor = Math.exp(Math.min(Math.max(event.deltaY, -60), 60) * 0.005);
  onView(zoom(view, lanes.range, factor, around));
  return true;
}

interface CursorProps {
  readonly scene: Scene;
  readonly communication: Communication;
  readonly row: number;
  readonly isChosen?: boolean;
}

/** Marks a call, if it is in sight. */
function Cursor({ scene, communication, row, isChosen = false }: CursorProps) {
  const { frame, lanes } = scene;
  const rank = communication.calls.rank[row];
  const lane = lanes.all.findIndex((one) => one.rank === rank);
  const x = frame.x(lanes.xs[row] ?? Number.NaN);
  if (lane < 0 || !(x >= frame.left - 1 && x <= frame.width + 1)) return null;
  return (
    <div
      class={isChosen ? "timeline-cursor timeline-chosen" : "timeline-cursor"}
      style={{
        left: `${x}px`,
        top: `${frame.top + lane * frame.laneHeight}px`,
        height: `${frame.laneHeight}px`,
      }}
    />
  );
}

/** A listener that may keep the wheel from the page, which Preact's may not. */
function useWheel(
  box: { readonly current: HTMLElement | null },
  take: (event: WheelEvent) => boolean,
): void {
  const latest = useRef(take);
  latest.current = take;
  useEffect(() => {
    const element = box.current;
    const listen = (event: WheelEvent): void => {
      if (latest.current(event)) event.preventDefault();
    };
    element?.addEventListener("wheel", listen, { passive: false });
    return () => element?.removeEventListener("wheel", listen);
  }, []);
}
