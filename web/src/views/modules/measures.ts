/** Measures of modules, and how their values are formatted. */
import type { EarlierModules, GoneModules, Modules, Page } from "../../page";
import { formatBytes, formatNumber } from "../../parts/units";
import { earlierModules, isTrafficCompared } from "../../store/earlier_modules";
import { moduleTraffic } from "../../store/module_traffic";

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
    sizeOf: (_, position) => moduleTraffic.value[position]?.wire_bytes ?? 0,
    format: formatBytes,
  },
  {
    id: "count",
    recorded: "wire",
    title: "Collectives",
    hint: "collectives that one rank issues, including children",
    figure: "count",
    isTraffic: true,
    sizeOf: (_, position) => moduleTraffic.value[position]?.count ?? 0,
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

/** Whether figures were recorded, even if all are zero. */
export function isRecorded({ recorded }: Modules | EarlierModules, name: string): boolean {
  return recorded.includes(name);
}

/** Measures that have a value above zero, whatever is selected. */
export function listMeasures({ modules, communication }: Page): Measure[] {
  const hasTraffic = {
    wire: communication?.traffic.wire_bytes.some((value) => value > 0),
    count: Boolean(communication?.traffic.count.length),
  };
  return MEASURES.filter(({ id, isTraffic, sizeOf }) =>
    isTraffic
      ? hasTraffic[id as "wire" | "count"]
      : modules.path.some((_, i) => sizeOf(modules, i) > 0),
  );
}

/**
 * Figures of the earlier recording, if both recordings have this measure and, for collectives, can be
 * filtered by what is selected.
 */
export function findEarlier(modules: Modules, { figure, recorded, isTraffic }: Measure) {
  const known = earlierModules.value;
  if (isTraffic && !isTrafficCompared.value) return null;
  if (!known || !isRecorded(known, recorded) || !isRecorded(modules, recorded)) return null;
  return {
    values: known[figure],
    gone: known.gone,
    goneSize: (gone: GoneModules) => gone[figure],
  };
}
