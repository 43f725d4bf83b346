/** Columns of the tree: phases by bytes or by counts, parameters, memory. */
import type { Modules } from "../../page";
import { Bar } from "../../parts/bar";
import { formatBytesCell, formatCount } from "../../parts/units";
import { sumShown } from "./folded_sums";
import { formatChange } from "./icicle_model";
import { findEarlier, MEASURES, type Measure, sumPhases } from "./measures";

export interface TreeColumn {
  readonly id: string;
  readonly title: string;
  readonly hint: string;
  readonly width: number; // in rem
  readonly cell: (position: number) => preact.ComponentChildren;
}

export type Show = "bytes" | "counts";

/**
 * Columns that have values; what was not recorded has no column. A row that represents folded
 * layers (see `shown`) has the sums of them all.
 */
export function listColumns(modules: Modules, show: Show, shown: Int32Array): TreeColumn[] {
  return [...listTrafficColumns(modules, show, shown), ...listMemoryColumns(modules, shown)];
}

function listTrafficColumns(modules: Modules, show: Show, shown: Int32Array): TreeColumn[] {
  const column = show === "bytes" ? modules.total_wire_bytes : modules.total_count;
  if (!column.some(hasAny)) return [];
  const format = show === "bytes" ? formatBytesCell : formatCount;
  const what = show === "bytes" ? "bytes sent (ring estimate)" : "collectives";
  const each = modules.path.map((_, i) => sumPhases(column, i));
  const totals = sumShown(each, shown);
  const max = totals.reduce((a, b) => Math.max(a, b), 0);
  const phases = modules.phases.flatMap((phase, phaseIndex): TreeColumn[] => {
    if (!column.some((figures) => figures[phaseIndex]! > 0)) return [];
    const sums = sumShown(
      column.map((figures) => figures[phaseIndex]!),
      shown,
    );
    const hint = `${what} of one rank in ${phase}, including children`;
    return [
      {
        id: phase,
        title: phase,
        hint,
        width: 6.5,
        cell: (i) => format(sums[i]!),
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
  const measure = MEASURES.find(({ id }) => id === (show === "bytes" ? "wire" : "count"))!;
  return [total, ...listChangeColumn(modules, measure, totals, shown), ...phases];
}

/** The change since the earlier recording, if the page compares two. */
function listChangeColumn(
  modules: Modules,
  measure: Measure,
  totals: Float64Array,
  shown: Int32Array,
): TreeColumn[] {
  const comparison = findEarlier(modules, measure);
  if (!comparison) return [];
  const earlier = sumShown(comparison.values, shown);
  const cell = (i: number) => formatChange(totals[i]!, earlier[i]!, measure.format);
  return [
    {
      id: "change",
      title: "change",
      hint: `change of ${measure.title.toLowerCase()} since the earlier recording`,
      width: 11,
      cell: (i) => (totals[i] === earlier[i] ? "·" : cell(i)),
    },
  ];
}

/** If ranks differ, the figure is the busiest rank's, an upper bound. */
function formatBound(modules: Modules, position: number, text: string): string {
  return modules.is_uneven[position] && text !== "·" ? `≤ ${text}` : text;
}

function listMemoryColumns(modules: Modules, shown: Int32Array): TreeColumn[] {
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
      const sums = sumShown(column, shown);
      return { id: title, title, hint, width, cell: (i) => format(sums[i]!) };
    });
}

function hasAny(column: readonly number[]): boolean {
  return column.some((value) => value > 0);
}
