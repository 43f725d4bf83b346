/** Columns of the tree: phases by bytes or by counts, parameters, memory. */
import type { Modules } from "../../page";
import { Bar } from "../../parts/bar";
import { isNarrow } from "../../parts/narrow";
import { formatBytesCell, formatCount } from "../../parts/units";
import type { ModuleTraffic } from "../../store/module_traffic";
import { sumShown } from "./folded_sums";
import { formatChange } from "./icicle_model";
import { findEarlier, MEASURES } from "./measures";

export interface TreeColumn {
  readonly id: string;
  readonly title: string;
  readonly hint: string;
  readonly width: number; // in rem
  readonly hasBar?: boolean; // which a narrow screen leaves out
  readonly cell: (position: number) => preact.ComponentChildren;
}

export type Show = "bytes" | "counts";

interface ColumnInput {
  readonly modules: Modules;
  readonly phases: readonly string[];
  readonly traffic: readonly ModuleTraffic[];
  readonly show: Show;
  readonly shown: Int32Array; // for each module, the one whose row represents it
}

/**
 * Columns that have values; what was not recorded has no column. A row that represents folded
 * layers has the sums of them all.
 */
export function listColumns(input: ColumnInput): TreeColumn[] {
  return [...listTrafficColumns(input), ...listMemoryColumns(input)];
}

function listTrafficColumns(input: ColumnInput): TreeColumn[] {
  const { phases, traffic, show, shown } = input;
  const isBytes = show === "bytes";
  const format = isBytes ? formatBytesCell : formatCount;
  const what = isBytes ? "bytes sent (ring estimate)" : "collectives";
  const totals = sumShown(
    traffic.map((figures) => figures[isBytes ? "wire_bytes" : "count"]),
    shown,
  );
  const max = totals.reduce((highest, total) => Math.max(highest, total), 0);
  if (!max) return [];
  const phaseColumns = phases.flatMap((phase, at): TreeColumn[] => {
    const sums = sumShown(
      traffic.map((figures) => figures[isBytes ? "phaseBytes" : "phaseCounts"][at] ?? 0),
      shown,
    );
    if (!sums.some((sum) => sum > 0)) return [];
    const hint = `${what} of one rank in ${phase}, including children`;
    return [{ id: phase, title: phase, hint, width: 6.5, cell: (i) => format(sums[i]!) }];
  });
  const total: TreeColumn = {
    id: "total",
    title: isBytes ? "sent" : "collectives",
    hint: `${what} of one rank in all phases, including children`,
    width: 11,
    hasBar: true,
    cell: (i) => (
      <Bar value={totals[i]!} max={max} text={formatBound(traffic[i]!, format(totals[i]!))} />
    ),
  };
  return [total, ...listChangeColumn(input, totals), ...phaseColumns];
}

/** The change since the earlier recording, if the page compares two. */
function listChangeColumn(
  { modules, show, shown }: ColumnInput,
  totals: Float64Array,
): TreeColumn[] {
  const measure = MEASURES.find(({ id }) => id === (show === "bytes" ? "wire" : "count"))!;
  const comparison = findEarlier(modules, measure);
  if (!comparison) return [];
  const earlier = sumShown(comparison.values, shown);
  return [
    {
      id: "change",
      title: "change",
      hint: `change of ${measure.title.toLowerCase()} since the earlier recording`,
      width: isNarrow.value ? 10.5 : 11,
      cell: (i) =>
        totals[i] === earlier[i] ? "·" : formatChange(totals[i]!, earlier[i]!, measure.format),
    },
  ];
}

/** If ranks differ, the figure is the busiest rank's, an upper bound. */
function formatBound({ isUneven }: ModuleTraffic, text: string): string {
  return isUneven && text !== "·" ? `≤ ${text}` : text;
}

function listMemoryColumns({ modules, shown }: ColumnInput): TreeColumn[] {
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
