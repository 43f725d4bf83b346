/** What modules are measured by, and how it reads. */
import type { Modules } from "../../page";
import { formatBytes, formatNumber } from "../../parts/units";

export interface Measure {
  readonly id: string;
  readonly title: string;
  readonly hint: string;
  readonly sizeOf: (modules: Modules, position: number) => number;
  readonly format: (value: number) => string;
}

export const MEASURES: readonly Measure[] = [
  {
    id: "wire",
    title: "Wire bytes",
    hint: "what one rank sends, children included",
    sizeOf: (modules, position) => sumPhases(modules.total_wire_bytes, position),
    format: formatBytes,
  },
  {
    id: "parameters",
    title: "Parameters",
    hint: "elements of the whole model; tied ones once",
    sizeOf: (modules, position) => modules.total_parameters[position] ?? 0,
    format: formatNumber,
  },
  {
    id: "memory",
    title: "Peak memory",
    hint: "what one rank holds for it at the peak of memory",
    sizeOf: (modules, position) => modules.total_peak_bytes[position] ?? 0,
    format: formatBytes,
  },
];

/** All phases of a module; columns by phase have a figure of each of them for each module. */
export function sumPhases(column: readonly (readonly number[])[], position: number): number {
  return (column[position] ?? []).reduce((sum, figure) => sum + figure, 0);
}

/** Those that say anything of this model. */
export function listMeasures(modules: Modules): Measure[] {
  return MEASURES.filter(({ sizeOf }) => modules.path.some((_, i) => sizeOf(modules, i) > 0));
}
