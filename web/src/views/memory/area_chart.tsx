/**
 * Memory over the step as a stacked area chart, with the peak, the phases and the device's capacity.
 * A click or a key chooses an instant, dragging two of them.
 */
import { useMemo, useRef, useState } from "preact/hooks";
import type { MemoryCurve } from "../../page";
import { seriesColor } from "../../parts/colors";
import { makeByteTicks, makeScale, type Scale } from "../../parts/scale";
import { hideTip, showTip } from "../../parts/tooltip";
import { formatBytes } from "../../parts/units";
import { useSize } from "../../parts/use_size";
import { moduleName } from "../../store/modules";
import { findEvent, type Instants, sumGroups } from "./allocations";
import { readChoice, setInstants } from "./instants";
import { makeAllocationFilter } from "./selected_curve";
import { findSample, stackKinds, sumAt, usedKinds } from "./stacked_series";

const HEIGHT = 340;
const TOP = 30; // space for the names of phases
const BOTTOM = 12;
const LEFT = 72;
const RIGHT = 12;
const HEADROOM = 1.08; // space above the highest value
const MIN_DRAG = 5; // pixels: less is a click

interface Frame {
  readonly x: Scale;
  readonly y: Scale;
  readonly width: number;
  readonly max: number;
}

function makeFrame(curve: MemoryCurve, width: number): Frame {
  const device = curve.device_bytes ?? 0;
  // The capacity of a device far larger than the peak would flatten the curve; it is shown as text only.
  const high = Math.max(curve.peak_bytes, device <= 2 * curve.peak_bytes ? device : 0) * HEADROOM;
  const last = curve.order.at(-1) ?? 1;
  const first = curve.order[0] ?? 0;
  return {
    x: makeScale([first, Math.max(last, first + 1)], [LEFT, width - RIGHT]),
    y: makeScale([0, Math.max(high, 1)], [HEIGHT - BOTTOM, TOP]),
    width,
    max: high,
  };
}

/** SVG path along the tops from left to right and back along the bottoms, as a step function. */
function makePath(
  curve: MemoryCurve,
  tops: readonly number[],
  bottoms: readonly number[] | null,
  { x, y, width }: Frame,
): string {
  const end = width - RIGHT;
  const xs = curve.order.map((moment) => x(moment).toFixed(1));
  const topEdge = tops.map(
    (value, i) => `${i ? `H${xs[i]}V` : `M${xs[0]} `}${y(value).toFixed(1)}`,
  );
  const bottomPoints = (bottoms ?? tops.map(() => 0)).map((value, i) => [
    xs[i],
    y(value).toFixed(1),
  ]);
  const bottomEdge = bottomPoints.reverse().map(([i, level]) => `V${level}H${i}`);
  return `${topEdge.join("")}H${end}${bottomEdge.join("")}Z`;
}

interface Props {
  readonly curve: MemoryCurve;
  readonly instants: Instants;
  readonly isPart: boolean; // whether the curve is of what is selected
}

export function AreaChart({ curve, instants, isPart }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const { width } = useSize(box);
  const [sample, setSample] = useState(-1);
  const dragStart = useRef<{ x: number; order: number } | null>(null);
  const frame = useMemo(() => makeFrame(curve, Math.max(width, 200)), [curve, width]);
  const layers = useMemo(() => stackKinds(curve), [curve]);
  const showInstant = (order: number, clientX: number, clientY: number): void => {
    const next = findSample(curve.order, order);
    setSample(next);
    const bytes = readBytes(curve, order, isPart);
    showTip(<InstantTip curve={curve} sample={next} bytes={bytes} />, clientX, clientY);
  };
  const handleLeave = (): void => {
    setSample(-1);
    hideTip();
  };
  const orderAt = (event: PointerEvent): number => {
    const left = (event.currentTarget as Element).getBoundingClientRect().left;
    return findInstant(curve, frame.x.invert(event.clientX - left));
  };
  const handlePointerDown = (event: PointerEvent): void => {
    if (event.button !== 0) return;
    dragStart.current = { x: event.clientX, order: orderAt(event) };
    (event.currentTarget as Element).setPointerCapture(event.pointerId);
  };
  const handlePointerMove = (event: PointerEvent): void => {
    const order = orderAt(event);
    showInstant(order, event.clientX, event.clientY);
    const start = dragStart.current;
    if (start && Math.abs(event.clientX - start.x) >= MIN_DRAG) {
      setInstants(order, start.order, { isReplacing: true });
    }
  };
  const handlePointerUp = (event: PointerEvent): void => {
    const start = dragStart.current;
    dragStart.current = null;
    if (!start || Math.abs(event.clientX - start.x) >= MIN_DRAG) return;
    const choice = readChoice(curve);
    setInstants(start.order, event.shiftKey ? (choice.from ?? choice.at) : null);
  };
  const handleKey = (event: KeyboardEvent): void => {
    if (event.key === "Escape" && (instants.from !== null || sample >= 0)) {
      event.stopPropagation();
      handleLeave();
      setInstants(null);
      return;
    }
    const { at, from } = readChoice(curve);
    if (event.key === "Enter") {
      setInstants(at, at); // the next key compares with this instant
      return;
    }
    const next = moveByKey(event, curve, at);
    if (next === null) return;
    event.preventDefault();
    setInstants(next, from, { isReplacing: true });
    const bounds = (event.currentTarget as Element).getBoundingClientRect();
    showInstant(next, bounds.left + frame.x(next), bounds.top + TOP);
  };
  const current = findSample(curve.order, instants.at);
  return (
    <div data-chart="memory over the step">
      <div
        ref={box}
        class="area"
        role="slider"
        tabIndex={0}
        aria-label="memory over the step"
        aria-valuemin={0}
        aria-valuemax={curve.order.length - 1}
        aria-valuenow={current}
        aria-valuetext={formatBytes(sumAt(curve, current))}
        onPointerDown={handlePointerDown}
        onPointerMove={handlePointerMove}
        onPointerUp={handlePointerUp}
        onPointerLeave={handleLeave}
        onKeyDown={handleKey}
        onBlur={handleLeave}
      >
        {width > 0 && (
          <svg width={width} height={HEIGHT} aria-hidden="true">
            <Phases curve={curve} frame={frame} />
            <ByteTicks frame={frame} />
            {usedKinds(curve).map((kind) => (
              <path
                key={kind}
                class="area-layer"
                d={makePath(curve, layers[kind]!, kind ? layers[kind - 1]! : null, frame)}
                fill={seriesColor(kind)}
              />
            ))}
            <Peak curve={curve} frame={frame} label={isPart ? "most of it" : "peak"} />
            <Device curve={curve} frame={frame} />
            <Chosen instants={instants} frame={frame} />
            {sample >= 0 && (
              <line
                class="area-cursor"
                x1={frame.x(curve.order[sample]!)}
                x2={frame.x(curve.order[sample]!)}
                y1={TOP}
                y2={HEIGHT - BOTTOM}
              />
            )}
          </svg>
        )}
      </div>
      <ul class="area-legend" aria-label="categories">
        {usedKinds(curve).map((kind) => (
          <li key={kind}>
            <span class="swatch" style={{ background: seriesColor(kind) }} />
            {curve.kinds[kind]}
          </li>
        ))}
      </ul>
    </div>
  );
}

/** The event nearest to a position; where allocations were not recorded, that of a sample. */
function findInstant(curve: MemoryCurve, position: number): number {
  const sample = findSample(curve.order, position);
  if (!curve.allocations) return curve.order[sample]!;
  const first = curve.order[0]!;
  return Math.min(Math.max(Math.round(position), first), curve.order.at(-1)!);
}

/** Arrows move by what the chart shows, with Shift by a single allocation or release. */
function moveByKey(event: KeyboardEvent, curve: MemoryCurve, at: number): number | null {
  const sample = findSample(curve.order, at);
  const isAfter = curve.order[sample]! < at;
  const targets: Readonly<Record<string, number>> = {
    ArrowLeft: isAfter ? sample : sample - 1,
    ArrowRight: sample + 1,
    PageUp: sample - 25,
    PageDown: sample + 25,
    Home: 0,
    End: curve.order.length - 1,
  };
  const target = targets[event.key];
  if (target === undefined) return null;
  if (event.shiftKey && event.key.startsWith("Arrow") && curve.allocations) {
    return findEvent(curve.allocations, at, event.key === "ArrowLeft" ? -1 : 1) ?? at;
  }
  return curve.order[Math.min(Math.max(target, 0), curve.order.length - 1)]!;
}

/** The instants that are shown below, with what is between them shaded. */
function Chosen({ instants: { at, from }, frame }: { instants: Instants; frame: Frame }) {
  const height = HEIGHT - BOTTOM - TOP;
  return (
    <g class="area-chosen">
      {from !== null && (
        <rect x={frame.x(from)} width={frame.x(at) - frame.x(from)} y={TOP} height={height} />
      )}
      {(from === null ? [at] : [from, at]).map((order) => (
        <line
          key={order}
          x1={frame.x(order)}
          x2={frame.x(order)}
          y1={TOP - 4}
          y2={HEIGHT - BOTTOM}
        />
      ))}
    </g>
  );
}

function Phases({ curve, frame }: { curve: MemoryCurve; frame: Frame }) {
  return (
    <g class="area-phases">
      {curve.phases.map((range, i) => {
        const left = frame.x(curve.order[range.first] ?? 0);
        const next = curve.order[range.last + 1];
        const right = next === undefined ? frame.width - RIGHT : frame.x(next);
        return (
          <g key={i}>
            {i % 2 === 1 && (
              <rect
                x={left}
                width={Math.max(right - left, 0)}
                y={TOP}
                height={HEIGHT - BOTTOM - TOP}
              />
            )}
            {i > 0 && <line x1={left} x2={left} y1={TOP - 14} y2={HEIGHT - BOTTOM} />}
            {right - left > range.phase.length * 6.3 + 6 && (
              <text x={left + 6} y={TOP - 8}>
                {range.phase}
              </text>
            )}
          </g>
        );
      })}
    </g>
  );
}

function ByteTicks({ frame }: { frame: Frame }) {
  return (
    <g class="area-levels">
      {makeByteTicks(frame.max).map((level) => (
        <g key={level}>
          <line x1={LEFT} x2={frame.width - RIGHT} y1={frame.y(level)} y2={frame.y(level)} />
          <text x={LEFT - 8} y={frame.y(level)} dy="0.35em">
            {formatBytes(level)}
          </text>
        </g>
      ))}
    </g>
  );
}

interface PeakProps {
  readonly curve: MemoryCurve;
  readonly frame: Frame;
  readonly label: string;
}

function Peak({ curve, frame, label }: PeakProps) {
  const x = frame.x(curve.order[curve.peak] ?? 0);
  const y = frame.y(curve.peak_bytes);
  const isRight = x > frame.width / 2;
  return (
    <g class="area-peak">
      <line x1={x} x2={x} y1={y} y2={HEIGHT - BOTTOM} />
      <circle cx={x} cy={y} r={4} />
      <text x={isRight ? x - 9 : x + 9} y={y - 7} text-anchor={isRight ? "end" : "start"}>
        {label} {formatBytes(curve.peak_bytes)}
      </text>
    </g>
  );
}

function Device({ curve, frame }: { curve: MemoryCurve; frame: Frame }) {
  if (curve.device_bytes === null || curve.device_bytes > frame.max) return null;
  const y = frame.y(curve.device_bytes);
  return (
    <g class="area-device">
      <line x1={LEFT} x2={frame.width - RIGHT} y1={y} y2={y} />
      <text x={LEFT + 6} y={y - 6}>
        device {formatBytes(curve.device_bytes)}
      </text>
    </g>
  );
}

/** Bytes of each kind at an instant; a sample is of the highest in its interval. */
function readBytes(curve: MemoryCurve, order: number, isPart: boolean): readonly number[] {
  const { allocations } = curve;
  if (!allocations) {
    const sample = findSample(curve.order, order);
    return curve.num_bytes.map((column) => column[sample] ?? 0);
  }
  const isShown = isPart ? makeAllocationFilter(allocations) : undefined;
  const [sums] = sumGroups(allocations, { at: order, from: null }, () => 0, isShown);
  return curve.kinds.map((_, kind) => sums?.bytesByKind[kind] ?? 0);
}

interface TipProps {
  readonly curve: MemoryCurve;
  readonly sample: number;
  readonly bytes: readonly number[]; // of each kind
}

function InstantTip({ curve, sample, bytes }: TipProps) {
  const total = bytes.reduce((sum, numBytes) => sum + numBytes, 0);
  const phase = curve.phases.find((range) => sample >= range.first && sample <= range.last)?.phase;
  return (
    <>
      <div class="tooltip-title">
        {formatBytes(total)} {phase && <span class="dim">in {phase}</span>}
      </div>
      {curve.module[sample]! >= 0 && (
        <div class="dim mono">{moduleName(curve.module[sample]!)}</div>
      )}
      <dl>
        {usedKinds(curve)
          .reverse()
          .filter((kind) => bytes[kind])
          .map((kind) => (
            <>
              <dt>
                <span class="swatch" style={{ background: seriesColor(kind) }} />
                {curve.kinds[kind]!.replaceAll("_", " ")}
              </dt>
              <dd>{formatBytes(bytes[kind]!)}</dd>
            </>
          ))}
      </dl>
    </>
  );
}
