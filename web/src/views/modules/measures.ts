/** Measures of modules, and how their values are formatted. */
import type { EarlierModules, GoneModules, Modules } from "../../page";
import { formatBytes, formatNumber } from "../../parts/units";

type FigureName = "count" | "wire_bytes" | "parameters" | "local_bytes" | "peak_bytes";

export interface Measure {
  readonly id: string;
  readonly recorded: string; // the entry of Modules.recorded that it needs
  readonly title: string;
  readonly hint: string;
  readonly figure: FigureName; // its name in EarlierModules
  readonly isTraffic: boolean; // of collectives, which have an axis, a kind and a phase
  readonly sizeOf: (modules: Modules, position: number) => number;
  readonly format: (value: number) => string;
}

export const MEASURES: readonly Measure[] = [
  {
    id: "wire",
    recorded: "wire",
    title: "Bytes sent",
    hint: "what one rank sends (ring estimate), including children",
    figure: "wire_bytes",
    isTraffic: true,
    sizeOf: (modules, position) => sumPhases(modules.total_wire_bytes, position),
    format: formatBytes,
  },
  {
    id: "count",
    recorded: "wire",
    title: "Collectives",
    hint: "collectives that one rank issues, including children",
    figure: "count",
    isTraffic: true,
    sizeOf: (modules, position) => sumPhases(modules.total_count, position),
    format: formatNumber,
  },
  {
    id: "parameters",
    recorded: "parameters",
    title: "Parameters",
    hint: "elements of the global parameters; tied ones once",
    figure: "parameters",
    isTraffic: false,
    sizeOf: (modules, position) => modules.total_parameters[position] ?? 0,
    format: formatNumber,
  },
  {
    id: "held",
    recorded: "local",
    title: "Held",
    hint: "bytes of its parameters on one rank",
    figure: "local_bytes",
    isTraffic: false,
    sizeOf: (modules, position) => modules.total_local_bytes[position] ?? 0,
    format: formatBytes,
  },
  {
    id: "memory",
    recorded: "peak",
    title: "Peak memory",
    hint: "what one rank holds for it at the peak of memory (estimated)",
    figure: "peak_bytes",
    isTraffic: false,
    sizeOf: (modules, position) => modules.total_peak_bytes[position] ?? 0,
    format: formatBytes,
  },
];

/** Sum over all phases of a module; `column` has a list of figures by phase for each module. */
export function sumPhases(column: readonly (readonly number[])[], position: number): number {
  return (column[position] ?? []).reduce((sum, figure) => sum + figure, 0);
}

/** Whether figures were recorded, even if all are zero. */
export function isRecorded({ recorded }: Modules | EarlierModules, name: string): boolean {
  return recorded.includes(name);
}

/** Measures that have a value above zero. */
export function listMeasures(modules: Modules): Measure[] {
  return MEASURES.filter(({ sizeOf }) => modules.path.some((_, i) => sizeOf(modules, i) > 0));
}

/** Figures of the earlier recording, if both recordings have this measure. */
export function findEarlier(modules: Modules, { figure, recorded }: Measure) {
  const { earlier } = modules;
  if (!earlier || !isRecorded(earlier, recorded) || !isRecorded(modules, recorded)) return null;
  return {
    values: earlier[figure],
    gone: earlier.gone,
    goneSize: (gone: GoneModules) => gone[figure],
  };
}
