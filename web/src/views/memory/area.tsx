/** What is held over the step as a stacked area, with its peak, its phases and what the device has. */
import { useMemo, useRef, useState } from "preact/hooks";
import type { MemoryCurve } from "../../page";
import { colorOf } from "../../parts/colors";
import { makeByteTicks, makeScale, type Scale } from "../../parts/scale";
import { useSize } from "../../parts/size";
import { hideTip, showTip } from "../../parts/tooltip";
import { formatBytes } from "../../parts/units";
import { nameOf } from "../../store/modules";
import { sampleAt, stackUp, totalAt, usedKinds } from "./stack";

const HEIGHT = 340;
const TOP = 30; // where phases are named
const BOTTOM = 12;
const LEFT = 72;
const RIGHT = 12;
const ROOM = 1.08; // above the highest

interface Frame {
  readonly x: Scale;
  readonly y: Scale;
  readonly width: number;
  readonly most: number;
}

function makeFrame(curve: MemoryCurve, width: number): Frame {
  const device = curve.device_bytes ?? 0;
  // A device far larger than the peak would press the curve flat: then it is told in words.
  const high = Math.max(curve.peak_bytes, device <= 2 * curve.peak_bytes ? device : 0) * ROOM;
  const last = curve.order.at(-1) ?? 1;
  const first = curve.order[0] ?? 0;
  return {
    x: makeScale([first, Math.max(last, first + 1)], [LEFT, width - RIGHT]),
    y: makeScale([0, Math.max(high, 1)], [HEIGHT - BOTTOM, TOP]),
    width,
    most: high,
  };
}

/** Along the tops from left to right, and back along the bottoms; values hold until the next. */
function makePath(
  curve: MemoryCurve,
  tops: readonly number[],
  bottoms: readonly number[] | null,
  { x, y, width }: Frame,
): string {
  const end = width - RIGHT;
  const xs = curve.order.map((one) => x(one).toFixed(1));
  const over = tops.map((one, at) => `${at ? `H${xs[at]}V` : `M${xs[0]} `}${y(one).toFixed(1)}`);
  const under = (bottoms ?? tops.map(() => 0)).map((one, at) => [xs[at], y(one).toFixed(1)]);
  const back = under.reverse().map(([at, level]) => `V${level}H${at}`);
  return `${over.join("")}H${end}${back.join("")}Z`;
}

export function Area({ curve }: { curve: MemoryCurve }) {
  const box = useRef<HTMLDivElement>(null);
  const { width } = useSize(box);
  const [at, setAt] = useState(-1);
  const frame = useMemo(() => makeFrame(curve, Math.max(width, 200)), [curve, width]);
  const layers = useMemo(() => stackUp(curve), [curve]);
  const point = (next: number, clientX: number, clientY: number): void => {
    setAt(next);
    showTip(<Moment curve={curve} at={next} />, clientX, clientY);
  };
  const leave = (): void => {
    setAt(-1);
    hideTip();
  };
  const follow = (event: PointerEvent): void => {
    const left = (event.currentTarget as Element).getBoundingClientRect().left;
    point(
      sampleAt(curve.order, frame.x.invert(event.clientX - left)),
      event.clientX,
      event.clientY,
    );
  };
  const step = (event: KeyboardEvent): void => {
    const next = stepTo(event.key, at < 0 ? curve.peak : at, curve.order.length);
    if (next === null) return;
    event.preventDefault();
    const place = (event.currentTarget as Element).getBoundingClientRect();
    point(next, place.left + frame.x(curve.order[next]!), place.top + TOP);
  };
  return (
    <div
      ref={box}
      class="area"
      role="slider"
      tabIndex={0}
      aria-label="memory over the step"
      aria-valuemin={0}
      aria-valuemax={curve.order.length - 1}
      aria-valuenow={at < 0 ? curve.peak : at}
      aria-valuetext={formatBytes(totalAt(curve, at < 0 ? curve.peak : at))}
      onPointerMove={follow}
      onPointerLeave={leave}
      onKeyDown={step}
      onBlur={leave}
    >
      {width > 0 && (
        <svg width={width} height={HEIGHT} aria-hidden="true">
          <Phases curve={curve} frame={frame} />
          <Levels frame={frame} />
          {usedKinds(curve).map((kind) => (
            <path
              key={kind}
              class="area-layer"
              d={makePath(curve, layers[kind]!, kind ? layers[kind - 1]! : null, frame)}
              fill={colorOf(kind)}
            />
          ))}
          <Peak curve={curve} frame={frame} />
          <Device curve={curve} frame={frame} />
          {at >= 0 && (
            <line
              class="area-cursor"
              x1={frame.x(curve.order[at]!)}
              x2={frame.x(curve.order[at]!)}
              y1={TOP}
              y2={HEIGHT - BOTTOM}
            />
          )}
        </svg>
      )}
    </div>
  );
}

function stepTo(key: string, at: number, num: number): number | null {
  const moves: Readonly<Record<string, number>> = {
    ArrowLeft: at - 1,
    ArrowRight: at + 1,
    PageUp: at - 25,
    PageDown: at + 25,
    Home: 0,
    End: num - 1,
  };
  const next = moves[key];
  return next === undefined ? null : Math.min(Math.max(next, 0), num - 1);
}

function Phases({ curve, frame }: { curve: MemoryCurve; frame: Frame }) {
  return (
    <g class="area-phases">
      {curve.phases.map((one, i) => {
        const left = frame.x(curve.order[one.first] ?? 0);
        const next = curve.order[one.last + 1];
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
            {right - left > one.phase.length * 7 && (
              <text x={left + 6} y={TOP - 8}>
                {one.phase}
              </text>
            )}
          </g>
        );
      })}
    </g>
  );
}

function Levels({ frame }: { frame: Frame }) {
  return (
    <g class="area-levels">
      {makeByteTicks(frame.most).map((one) => (
        <g key={one}>
          <line x1={LEFT} x2={frame.width - RIGHT} y1={frame.y(one)} y2={frame.y(one)} />
          <text x={LEFT - 8} y={frame.y(one)} dy="0.35em">
            {formatBytes(one)}
          </text>
        </g>
      ))}
    </g>
  );
}

function Peak({ curve, frame }: { curve: MemoryCurve; frame: Frame }) {
  const x = frame.x(curve.order[curve.peak] ?? 0);
  const y = frame.y(curve.peak_bytes);
  const isRight = x > frame.width / 2;
  return (
    <g class="area-peak">
      <line x1={x} x2={x} y1={y} y2={HEIGHT - BOTTOM} />
      <circle cx={x} cy={y} r={4} />
      <text x={isRight ? x - 9 : x + 9} y={y - 7} text-anchor={isRight ? "end" : "start"}>
        peak {formatBytes(curve.peak_bytes)}
      </text>
    </g>
  );
}

function Device({ curve, frame }: { curve: MemoryCurve; frame: Frame }) {
  if (curve.device_bytes === null || curve.device_bytes > frame.most) return null;
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

function Moment({ curve, at }: { curve: MemoryCurve; at: number }) {
  const phase = curve.phases.find((one) => at >= one.first && at <= one.last)?.phase;
  return (
    <>
      <div class="tooltip-title">
        {formatBytes(totalAt(curve, at))} {phase && <span class="dim">in {phase}</span>}
      </div>
      {curve.module[at]! >= 0 && <div class="dim mono">{nameOf(curve.module[at]!)}</div>}
      <dl>
        {usedKinds(curve)
          .reverse()
          .filter((kind) => curve.num_bytes[kind]![at])
          .map((kind) => (
            <>
              <dt>
                <span class="swatch" style={{ background: colorOf(kind) }} />
                {curve.kinds[kind]!.replaceAll("_", " ")}
              </dt>
              <dd>{formatBytes(curve.num_bytes[kind]![at]!)}</dd>
            </>
          ))}
      </dl>
    </>
  );
}
