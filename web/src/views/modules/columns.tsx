/** Columns of the tree: phases by bytes or by counts, parameters, memory. */
import type { Modules } from "../../page";
import { Bar } from "../../parts/bar";
import { formatBytesCell, formatCount } from "../../parts/units";
import { sumPhases } from "./measures";

export interface TreeColumn {
  readonly id: string;
  readonly title: string;
  readonly hint: string;
  readonly width: number; // in rem
  readonly cell: (position: number) => preact.ComponentChildren;
}

export type Show = "bytes" | "counts";

/** Columns that have values; what was not recorded has no column. */
export function listColumns(modules: Modules, show: Show): TreeColumn[] {
  return [...listTrafficColumns(modules, show), ...listMemoryColumns(modules)];
}

function listTrafficColumns(modules: Modules, show: Show): TreeColumn[] {
  const column = show === "bytes" ? modules.total_wire_bytes : modules.total_count;
  if (!column.some(hasAny)) return [];
  const format = show === "bytes" ? formatBytesCell : formatCount;
  const what = show === "bytes" ? "bytes sent (ring estimate)" : "collectives";
  const totals = modules.path.map((_, i) => sumPhases(column, i));
  const max = totals.reduce((a, b) => Math.max(a, b), 0);
  const phases = modules.phases.flatMap((phase, phaseIndex): TreeColumn[] => {
    if (!column.some((figures) => figures[phaseIndex]! > 0)) return [];
    const hint = `${what} of one rank in ${phase}, including children`;
    return [
      {
        id: phase,
        title: phase,
        hint,
        width: 6.5,
        cell: (i) => format(column[i]?.[phaseIndex] ?? 0),
      },
    ];
  });
  const total: TreeColumn = {
    id: "total",
    title: show === "bytes" ? "sent" : "collectives",
    hint: `${what} of one rank in all phases, including children`,
    width: 11,
    cell: (i) => (
      <Bar value={totals[i]!} max={max} text={formatBound(modules, i, format(totals[i]!))} />
    ),
  };
  return [total, ...phases];
}

/** If ranks differ, the figure is the busiest rank's, an upper bound. */
function formatBound(modules: Modules, position: number, text: string): string {
  return modules.is_uneven[position] && text !== "·" ? `≤ ${text}` : text;
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
