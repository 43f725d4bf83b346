/** What modules are measured by, and how it reads. */
import type { Modules } from "../../page";
import { formatBytes, formatNumber } from "../../parts/units";

export interface Measure {
  readonly id: string;
  readonly recorded: string; // the name in Modules.recorded without which it has no figures
  readonly title: string;
  readonly hint: string;
  readonly sizeOf: (modules: Modules, position: number) => number;
  readonly format: (value: number) => string;
}

export const MEASURES: readonly Measure[] = [
  {
    id: "wire",
    recorded: "wire",
    title: "Bytes sent",
    hint: "what one rank sends (ring estimate), including children",
    sizeOf: (modules, position) => sumPhases(modules.total_wire_bytes, position),
    format: formatBytes,
  },
  {
    id: "parameters",
    recorded: "parameters",
    title: "Parameters",
    hint: "elements of the global parameters; tied ones once",
    sizeOf: (modules, position) => modules.total_parameters[position] ?? 0,
    format: formatNumber,
  },
  {
    id: "memory",
    recorded: "peak",
    title: "Peak memory",
    hint: "what one rank holds for it at the peak of memory (estimated)",
    sizeOf: (modules, position) => modules.total_peak_bytes[position] ?? 0,
    format: formatBytes,
  },
];

/** All phases of a module; columns by phase have a figure of each of them for each module. */
export function sumPhases(column: readonly (readonly number[])[], position: number): number {
  return (column[position] ?? []).reduce((sum, figure) => sum + figure, 0);
}

/** Whether figures were recorded, zeros among them. */
export function isRecorded({ recorded }: Modules, name: string): boolean {
  return recorded.includes(name);
}

/** Those that have a figure above zero. */
export function listMeasures(modules: Modules): Measure[] {
  return MEASURES.filter(({ sizeOf }) => modules.path.some((_, i) => sizeOf(modules, i) > 0));
}
