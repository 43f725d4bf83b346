/** The instants that the view shows, kept in the address: one, or two to compare. */
import type { MemoryCurve } from "../../page";
import { formatNumber } from "../../parts/units";
import { moduleName } from "../../store/modules";
import { changeRoute, navigate, param, route } from "../../store/route";
import type { Instants } from "./allocations";
import { findSample } from "./stacked_series";

/** The order of the peak, which is shown until another instant is chosen. */
export function peakOrder(curve: MemoryCurve): number {
  return curve.order[curve.peak] ?? 0;
}

/** As in the address: `from` is where a comparison was begun, which may be after `at`. */
export function readChoice(curve: MemoryCurve): Instants {
  return {
    at: readOrder(curve, "at") ?? peakOrder(curve),
    from: readOrder(curve, "from"),
  };
}

/** In their order; `from` is null if there is nothing to compare. */
export function readInstants(curve: MemoryCurve): Instants {
  const { at, from } = readChoice(curve);
  if (from === null || from === at) return { at, from: null };
  return { at: Math.max(from, at), from: Math.min(from, at) };
}

function readOrder(curve: MemoryCurve, name: string): number | null {
  const text = param(name);
  if (text === undefined || !/^-?\d+$/.test(text)) return null;
  const first = curve.order[0] ?? 0;
  return Math.min(Math.max(Number(text), first), curve.order.at(-1) ?? first);
}

/** Shows an instant, or what changed from one to another; without both, the peak. */
export function setInstants(
  at: number | null,
  from: number | null = null,
  { isReplacing = false } = {},
): void {
  const changes = {
    at: at === null ? null : String(at),
    from: from === null ? null : String(from),
  };
  navigate(changeRoute(route.value, route.value.view, changes), { isReplacing });
}

/** `event 1,234 (backward, layers.3.attention)`, `the peak`, `the start of the step`. */
export function nameInstant(curve: MemoryCurve, order: number): string {
  if (order === peakOrder(curve)) return "the peak";
  if (order === curve.order[0]) return "the start of the step";
  if (order === curve.order.at(-1)) return "the end of the step";
  return `event ${formatNumber(order)}`;
}

/** `backward, while layers.3.attention ran`. */
export function describeMoment(curve: MemoryCurve, order: number): string {
  const sample = findSample(curve.order, order);
  const phase = curve.phases.find((range) => sample >= range.first && sample <= range.last)?.phase;
  const module = curve.module[sample] ?? -1;
  const where = module >= 0 ? `while ${moduleName(module)} ran` : "";
  return [phase && `in ${phase}`, where].filter(Boolean).join(", ");
}
