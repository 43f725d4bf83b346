/** The drawn timeline; handles the pointer, the wheel and keys. */
import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Communication } from "../../page";
import { Canvas, remPixels } from "../../parts/canvas";
import { hideTip, showTip } from "../../parts/tooltip";
import { useSize } from "../../parts/use_size";
import { CallTip, describeCall, SpanTip } from "./call_detail";
import type { Lanes } from "./lanes";
import { pan, panTo, type Range, zoom } from "./ranges";
import { selectCall, selectedCall } from "./selected_call";
import {
  findCallAt,
  findSpanAt,
  type HeightScale,
  type LanePosition,
  makeFrame,
  moveByKey,
  rowAt,
  type TimelineLayout,
} from "./timeline_layout";
import { paint, paintMinimap } from "./timeline_painter";

export const ZOOM_STEP = 0.6;
const PAN_STEP = 0.25; // of the visible range
const MIN_DRAG = 5; // pixels; a shorter drag is a click
const MINIMAP = 2.2; // rem

interface Props {
  readonly communication: Communication;
  readonly matches: Uint8Array;
  readonly lanes: Lanes;
  readonly view: Range;
  readonly scale: HeightScale;
  readonly selectedRange: Range | null; // on the x axis
  readonly onView: (view: Range) => void;
  readonly onRange: (range: Range) => void; // a range was selected
}

interface DragRange {
  readonly from: number;
  readonly to: number;
  readonly isSelecting: boolean; // with Shift, which selects instead of zooming
}

export function Chart(props: Props) {
  const { communication, matches, lanes, view, scale, selectedRange, onView, onRange } = props;
  const box = useRef<HTMLDivElement>(null);
  const { width } = useSize(box);
  const [position, setPosition] = useState<LanePosition | null>(null);
  const [drag, setDrag] = useState<DragRange | null>(null);
  const rangeStart = useRef<number | null>(null); // set by the key [
  const layout = useMemo<TimelineLayout>(() => {
    const frame = makeFrame(lanes, view, Math.max(width, 120), remPixels());
    return { lanes, view, matches, frame };
  }, [lanes, view, matches, width]);
  const { frame } = layout;
  const draw = useCallback(
    (context: CanvasRenderingContext2D) => paint(context, communication, layout, scale),
    [communication, layout, scale],
  );
  const row = rowAt(layout, position);
  const selectRow = (next: number): void => selectCall(next, { isOnTimeline: true });
  const zoomBy = (factor: number, around: number): void =>
    onView(zoom(view, lanes.range, factor, around));

  useWheel(box, (event) => handleWheel(event, layout, onView));
  const handleLeave = (): void => {
    setPosition(null);
    setDrag(null);
    hideTip();
  };
  const handlePointerMove = (event: PointerEvent): void => {
    const { x, y } = pointerPosition(event);
    if (drag) setDrag({ ...drag, to: Math.max(x, frame.left) });
    const span = drag ? -1 : findSpanAt(layout, communication.spans, x, y);
    const call = drag || span >= 0 ? null : findCallAt(layout, x, y);
    setPosition(call);
    if (span >= 0) showTip(<SpanTip row={span} />, event.clientX, event.clientY);
    else if (call) showTip(<CallTip row={rowAt(layout, call)} />, event.clientX, event.clientY);
    else hideTip();
  };
  const handlePointerDown = (event: PointerEvent): void => {
    const { x } = pointerPosition(event);
    // Touch scrolls the page.
    if (!event.button && event.pointerType !== "touch" && x >= frame.left) {
      setDrag({ from: x, to: x, isSelecting: event.shiftKey });
    }
  };
  const handlePointerUp = (event: PointerEvent): void => {
    const { x, y } = pointerPosition(event);
    setDrag(null);
    if (drag && isWide(drag)) (drag.isSelecting ? onRange : onView)(toRange(drag, layout));
    else selectRow(rowAt(layout, findCallAt(layout, x, y)));
  };
  const handleKey = (event: KeyboardEvent): void => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const middle = lanes.xs[row] ?? (view.low + view.high) / 2;
    const next = moveByKey(layout, position, event.key);
    const panBy = (share: number): void =>
      onView(pan(view, lanes.range, share * (view.high - view.low)));
    const actions: Readonly<Record<string, () => void>> = {
      "+": () => zoomBy(ZOOM_STEP, middle),
      "=": () => zoomBy(ZOOM_STEP, middle),
      w: () => zoomBy(ZOOM_STEP, middle),
      "-": () => zoomBy(1 / ZOOM_STEP, middle),
      s: () => zoomBy(1 / ZOOM_STEP, middle),
      a: () => panBy(-PAN_STEP),
      d: () => panBy(PAN_STEP),
      "0": () => onView(lanes.range),
      Enter: () => row >= 0 && selectRow(row),
      "[": () => {
        rangeStart.current = middle;
      },
      "]": () => {
        const start = rangeStart.current ?? view.low;
        onRange({ low: Math.min(start, middle), high: Math.max(start, middle) });
      },
    };
    const action = next ? () => showCall(next) : actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  };
  const showCall = (next: LanePosition): void => {
    const x = lanes.xs[rowAt(layout, next)]!;
    setPosition(next);
    const nextView = panTo(view, lanes.range, x);
    onView(nextView);
    const { left, top } = box.current!.getBoundingClientRect();
    const callX = makeFrame(lanes, nextView, frame.width, remPixels()).x(x);
    const below = top + frame.top + (next.lane + 1) * frame.laneHeight;
    showTip(<CallTip row={rowAt(layout, next)} />, left + callX, below);
  };
  return (
    <>
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
        onPointerMove={handlePointerMove}
        onPointerDown={handlePointerDown}
        onPointerUp={handlePointerUp}
        onPointerLeave={handleLeave}
        onDblClick={() => onView(lanes.range)}
        onKeyDown={handleKey}
        onBlur={handleLeave}
      >
        {width > 0 && <Canvas width={frame.width} height={frame.height} draw={draw} />}
        <Cursor layout={layout} row={selectedCall.value.row} isSelected />
        <Cursor layout={layout} row={row} />
        {selectedRange && <RangeBand layout={layout} range={selectedRange} />}
        {drag && isWide(drag) && (
          <div
            class={drag.isSelecting ? "timeline-band timeline-range" : "timeline-band"}
            style={{
              left: `${Math.min(drag.from, drag.to)}px`,
              width: `${Math.abs(drag.to - drag.from)}px`,
            }}
          />
        )}
      </div>
      {width > 0 && <Minimap communication={communication} layout={layout} onView={onView} />}
    </>
  );
}

/** The selected range, as far as it is visible. */
function RangeBand({ layout, range }: { readonly layout: TimelineLayout; readonly range: Range }) {
  const { frame, lanes } = layout;
  const margin = lanes.xAxis === "order" ? 0.5 : 0;
  const left = Math.max(frame.x(range.low - margin), frame.left);
  const right = Math.min(frame.x(range.high + margin), frame.width);
  if (right <= left) return null;
  return (
    <div
      class="timeline-band timeline-range"
      style={{ left: `${left}px`, width: `${right - left}px` }}
    />
  );
}

interface MinimapProps {
  readonly communication: Communication;
  readonly layout: TimelineLayout;
  readonly onView: (view: Range) => void;
}

/** The full range in small, with the visible part framed; dragging moves it. Keys do the same. */
function Minimap({ communication, layout, onView }: MinimapProps) {
  const { frame, lanes, view } = layout;
  const { low, high } = lanes.range;
  const height = MINIMAP * remPixels();
  const isDragging = useRef(false);
  const width = frame.width - frame.left;
  const draw = useCallback(
    (context: CanvasRenderingContext2D) => paintMinimap(context, communication, layout, height),
    [communication, lanes, frame.left, frame.width, height],
  );
  const toPixels = (value: number): number => ((value - low) / (high - low)) * width;
  const moveTo = (event: PointerEvent): void => {
    const { left } = (event.currentTarget as Element).getBoundingClientRect();
    const point = low + ((event.clientX - left - frame.left) / width) * (high - low);
    onView(pan(view, lanes.range, point - (view.low + view.high) / 2));
  };
  return (
    <div
      class="minimap"
      aria-hidden="true"
      onPointerDown={(event) => {
        isDragging.current = true;
        event.currentTarget.setPointerCapture(event.pointerId);
        moveTo(event);
      }}
      onPointerMove={(event) => isDragging.current && moveTo(event)}
      onPointerUp={() => {
        isDragging.current = false;
      }}
    >
      <Canvas width={frame.width} height={height} draw={draw} />
      <div
        class="minimap-window"
        style={{
          left: `${frame.left + toPixels(view.low)}px`,
          width: `${Math.max(toPixels(view.high) - toPixels(view.low), 3)}px`,
        }}
      />
    </div>
  );
}

function pointerPosition(event: PointerEvent): { x: number; y: number } {
  const { left, top } = (event.currentTarget as Element).getBoundingClientRect();
  return { x: event.clientX - left, y: event.clientY - top };
}

function isWide({ from, to }: DragRange): boolean {
  return Math.abs(to - from) > MIN_DRAG;
}

/** The visible range that was dragged over. */
function toRange({ from, to }: DragRange, { frame, lanes }: TimelineLayout): Range {
  const low = frame.x.invert(Math.min(from, to));
  const high = frame.x.invert(Math.max(from, to));
  return zoom({ low, high }, lanes.range, 1, (low + high) / 2);
}

/** Zooms or pans; returns false if the wheel should scroll the page. */
function handleWheel(
  event: WheelEvent,
  layout: TimelineLayout,
  onView: (view: Range) => void,
): boolean {
  const { frame, view, lanes } = layout;
  const element = event.currentTarget as Element;
  const isSideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
  const isZoom = event.ctrlKey || event.metaKey || document.activeElement === element;
  if (isSideways) {
    const pixels = event.deltaX || event.deltaY;
    const distance = frame.x.invert(frame.left + pixels) - frame.x.invert(frame.left);
    onView(pan(view, lanes.range, distance));
    return true;
  }
  if (!isZoom) return false;
  const around = frame.x.invert(event.clientX - element.getBoundingClientRect().left);
  const factor = Math.exp(Math.min(Math.max(event.deltaY, -60), 60) * 0.005);
  onView(zoom(view, lanes.range, factor, around));
  return true;
}

interface CursorProps {
  readonly layout: TimelineLayout;
  readonly row: number;
  readonly isSelected?: boolean;
}

/** Highlights a call, if it is visible. */
function Cursor({ layout, row, isSelected = false }: CursorProps) {
  const { frame, lanes } = layout;
  const lane = row < 0 ? -1 : lanes.all.findIndex(({ calls }) => calls.includes(row));
  const x = frame.x(lanes.xs[row] ?? Number.NaN);
  if (lane < 0 || !(x >= frame.left - 1 && x <= frame.width + 1)) return null;
  return (
    <div
      class={isSelected ? "timeline-cursor timeline-selected" : "timeline-cursor"}
      style={{
        left: `${x}px`,
        top: `${frame.top + lane * frame.laneHeight}px`,
        height: `${frame.laneHeight}px`,
      }}
    />
  );
}

/** Adds a wheel listener that is not passive, so that it can prevent scrolling; Preact's are passive. */
function useWheel(
  box: { readonly current: HTMLElement | null },
  handle: (event: WheelEvent) => boolean,
): void {
  const latestHandler = useRef(handle);
  latestHandler.current = handle;
  useEffect(() => {
    const element = box.current;
    const listener = (event: WheelEvent): void => {
      if (latestHandler.current(event)) event.preventDefault();
    };
    element?.addEventListener("wheel", listener, { passive: false });
    return () => element?.removeEventListener("wheel", listener);
  }, []);
}
