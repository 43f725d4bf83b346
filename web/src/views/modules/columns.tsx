/** Columns of the tree: phases by bytes or by counts, parameters, memory. */
import type { Modules } from "../../page";
import { Bar } from "../../parts/bar";
import { formatBytesCell, formatCount } from "../../parts/units";
import type { ModuleTraffic } from "../../store/module_traffic";

export interface TreeColumn {
  readonly id: string;
  readonly title: string;
  readonly hint: string;
  readonly width: number; // in rem
  readonly cell: (position: number) => preact.ComponentChildren;
}

export type Show = "bytes" | "counts";

/** Columns that have values; what was not recorded has no column. */
export function listColumns(
  modules: Modules,
  phases: readonly string[],
  traffic: readonly ModuleTraffic[],
  show: Show,
): TreeColumn[] {
  return [...listTrafficColumns(phases, traffic, show), ...listMemoryColumns(modules)];
}

function listTrafficColumns(
  phases: readonly string[],
  traffic: readonly ModuleTraffic[],
  show: Show,
): TreeColumn[] {
  const isBytes = show === "bytes";
  const format = isBytes ? formatBytesCell : formatCount;
  const what = isBytes ? "bytes sent (ring estimate)" : "collectives";
  const totalOf = (i: number): number => traffic[i]![isBytes ? "wire_bytes" : "count"];
  const figureOf = (i: number, phase: number): number =>
    traffic[i]![isBytes ? "phaseBytes" : "phaseCounts"][phase] ?? 0;
  const max = traffic.reduce((highest, _, i) => Math.max(highest, totalOf(i)), 0);
  if (!max) return [];
  const phaseColumns = phases.flatMap((phase, at): TreeColumn[] => {
    if (!traffic.some((_, i) => figureOf(i, at) > 0)) return [];
    const hint = `${what} of one rank in ${phase}, including children`;
    return [{ id: phase, title: phase, hint, width: 6.5, cell: (i) => format(figureOf(i, at)) }];
  });
  const total: TreeColumn = {
    id: "total",
    title: isBytes ? "sent" : "collectives",
    hint: `${what} of one rank in all phases, including children`,
    width: 11,
    cell: (i) => (
      <Bar value={totalOf(i)} max={max} text={formatBound(traffic[i]!, format(totalOf(i)))} />
    ),
  };
  return [total, ...phaseColumns];
}

/** If ranks differ, the figure is the busiest rank's, an upper bound. */
function formatBound({ isUneven }: ModuleTraffic, text: string): string {
  return isUneven && text !== "·" ? `≤ ${text}` : text;
}

function listMemoryColumns(modules: Modules): TreeColumn[] {
  const columns: readonly [string, string, readonly number[], (value: number) => string][] = [
    [
      "parameters",
      "elements of the global parameters; tied ones once",
      modules.total_parameters,
      formatCount,
    ],
    ["held", "bytes of its parameters on one rank", modules.total_local_bytes, formatBytesCell],
    [
      "at peak",
      "bytes that one rank holds for it at the peak of memory (estimated)",
      modules.total_peak_bytes,
      formatBytesCell,
    ],
  ];
  return columns
    .filter(([, , column]) => hasAny(column))
    .map(([title, hint, column, format]) => {
      const width = title === "parameters" ? 9.5 : 6.5;
      return { id: title, title, hint, width, cell: (i) => format(column[i] ?? 0) };
    });
}

function hasAny(column: readonly number[]): boolean {
  return column.some((value) => value > 0);
}
