/** The visible range of the timeline: zooming, panning and ticks. */
import { makeTicks } from "../../parts/scale";
import { formatNumber, toFixed } from "../../parts/units";

/** The run's clock, or the order of issue if the clock was not recorded. */
export type XAxis = "time" | "order";

export interface Range {
  readonly low: number;
  readonly high: number;
}

const MIN_SHARE = 1e-5;

/** Scales the visible range by a factor around a point that keeps its position. */
export function zoom(view: Range, full: Range, factor: number, around: number): Range {
  const size = (view.high - view.low) * factor;
  const least = (full.high - full.low) * MIN_SHARE;
  const next = Math.min(Math.max(size, least), full.high - full.low);
  const share = (around - view.low) / (view.high - view.low);
  return clampRange({ low: around - share * next, high: around + (1 - share) * next }, full);
}

export function pan(view: Range, full: Range, by: number): Range {
  return clampRange({ low: view.low + by, high: view.high + by }, full);
}

/** The same range if the point is visible, else a range of the same size centred on it. */
export function panTo(view: Range, full: Range, point: number): Range {
  if (point >= view.low && point <= view.high) return view;
  return pan(view, full, point - (view.low + view.high) / 2);
}

function clampRange({ low, high }: Range, full: Range): Range {
  const size = Math.min(high - low, full.high - full.low);
  const start = Math.min(Math.max(low, full.low), full.high - size);
  return { low: start, high: start + size };
}

/** A range as it is in the address; null if it is not one, or is not inside of the full range. */
export function parseView(text: string | undefined, full: Range): Range | null {
  const [low, high] = (text ?? "").split("_").map(Number);
  const isValid = low !== undefined && high !== undefined && low < high;
  return isValid && low >= full.low && high <= full.high ? { low, high } : null;
}

/** The text of a range in the address; null for the full range. */
export function formatView({ low, high }: Range, full: Range): string | null {
  if (low <= full.low && high >= full.high) return null;
  const digits = Math.max(3 - Math.floor(Math.log10(high - low)), 0);
  const round = (value: number): number => Number(value.toFixed(Math.min(digits, 12)));
  return `${Math.max(round(low), full.low)}_${Math.min(round(high), full.high)}`;
}

const UNITS: readonly [string, number][] = [
  ["s", 1e9],
  ["ms", 1e6],
  ["µs", 1e3],
  ["ns", 1],
];

export interface Tick {
  readonly at: number;
  readonly text: string;
}

/** Distance of about `count` round values; there are at least two, even in little space. */
function findStep(size: number, count: number): number {
  return makeTicks(size, count)[1] ?? findStep(size, count + 1);
}

/** Round values in the visible range, with as many digits as are needed to tell them apart. */
export function makeTimelineTicks({ low, high }: Range, xAxis: XAxis, count = 6): Tick[] {
  const step = Math.max(findStep(high - low, count), xAxis === "order" ? 1 : 0);
  const first = Math.ceil(low / step);
  const number = Math.max(Math.floor(high / step) - first + 1, 0);
  const ticks = Array.from({ length: number }, (_, i) => (first + i) * step);
  if (xAxis === "order") return ticks.map((at) => ({ at, text: formatNumber(at) }));
  const [unit, size] = UNITS.find(([, unitSize]) => high >= unitSize) ?? UNITS.at(-1)!;
  const digits = Math.max(Math.ceil(-Math.log10(step / size) - 1e-9), 0);
  return ticks.map((at) => ({ at, text: `${toFixed(at / size, digits)} ${unit}` }));
}
