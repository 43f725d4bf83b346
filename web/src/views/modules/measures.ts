/** Measures of modules, and how their values are formatted. */
import type { Modules } from "../../page";
import { formatBytes, formatNumber } from "../../parts/units";
import { moduleTraffic } from "../../store/module_traffic";

export interface Measure {
  readonly id: string;
  readonly recorded: string; // the entry of Modules.recorded that it needs
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
    sizeOf: (_, position) => moduleTraffic.value[position]?.wire_bytes ?? 0,
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

/** Whether figures were recorded, even if all are zero. */
export function isRecorded({ recorded }: Modules, name: string): boolean {
  return recorded.includes(name);
}

/** Measures that have a value above zero. */
export function listMeasures(modules: Modules): Measure[] {
  return MEASURES.filter(({ sizeOf }) => modules.path.some((_, i) => sizeOf(modules, i) > 0));
}
