/** Figures of the page's modules in the earlier recording, of what is selected. */
import { computed } from "@preact/signals";
import type { EarlierModules, GoneModules } from "../page";
import { comparedFacets, makeEarlierFilter } from "./compared_figures";
import { earlier, isDropped } from "./earlier";
import type { EarlierData } from "./earlier_data";
import { sumModules } from "./module_traffic";
import { findModule } from "./modules";
import { page } from "./page";
import { selectedFacets } from "./selection";
import { findBusiest, NO_TRAFFIC, sumByRankSet, type TrafficSum } from "./traffic";

/** Null if nothing is compared, or if the earlier recording has no modules. */
export const earlierModules = computed<EarlierModules | null>(() => {
  const data = earlier.value?.data ?? null;
  if (isDropped.value) return data?.modules.length ? matchModules(data) : null;
  const known = page.value.modules.earlier;
  const isFiltered = selectedFacets.value.some((facet) => facet !== "module");
  return known && data && isFiltered ? filterTraffic(known, data) : known;
});

/** Whether the collectives of both recordings can be filtered by all that is selected. */
export const isTrafficCompared = computed(() =>
  selectedFacets.value.every((facet) => comparedFacets.value.includes(facet)),
);

/** The same modules, with figures of the selected collectives. */
function filterTraffic(known: EarlierModules, data: EarlierData): EarlierModules {
  const sums = sumOwners(data);
  return {
    ...known,
    count: sums.map(({ count }) => count),
    wire_bytes: sums.map(({ wire_bytes }) => wire_bytes),
    gone: known.gone.map((group) => {
      const { count, wire_bytes } = sumInside(data, group.paths);
      return { ...group, count, wire_bytes };
    }),
  };
}

/** Selected collectives of each module of the page, its children included. */
function sumOwners({ communication, modules }: EarlierData): readonly TrafficSum[] {
  const { path, parent } = page.value.modules;
  if (!communication) return path.map(() => NO_TRAFFIC);
  const owners = modules.map(findNearest);
  const traffic = {
    ...communication.traffic,
    owner: communication.traffic.owner.map((owner) => owners[owner] ?? -1),
    phase: communication.traffic.owner.map(() => 0), // sums by phase are not compared
  };
  return sumModules({ path, parent }, traffic, 1, makeEarlierFilter(["module"]));
}

/** The module of this name, or its nearest ancestor that the page has; -1 if there is none. */
function findNearest(name: string): number {
  for (let known = name; known; known = known.slice(0, Math.max(known.lastIndexOf("."), 0))) {
    const position = findModule(known);
    if (position >= 0) return position;
  }
  return findModule("");
}

/** Selected collectives of some modules and what is inside of them. */
function sumInside({ communication, modules }: EarlierData, paths: readonly string[]): TrafficSum {
  if (!communication) return NO_TRAFFIC;
  const { traffic } = communication;
  const isSelected = makeEarlierFilter(["module"]);
  const sums = paths.map((path) => {
    const isInside = modules.map((name) => name === path || name.startsWith(`${path}.`));
    const rows = [...traffic.count.keys()].filter(
      (row) => isInside[traffic.owner[row]!] && isSelected(row),
    );
    return findBusiest(sumByRankSet(traffic, rows));
  });
  return sums.reduce(addTraffic, NO_TRAFFIC);
}

function addTraffic(a: TrafficSum, b: TrafficSum): TrafficSum {
  return {
    count: a.count + b.count,
    input_bytes: a.input_bytes + b.input_bytes,
    wire_bytes: a.wire_bytes + b.wire_bytes,
  };
}

/** Finds the page's modules in a file that was dropped onto it, by their names. */
function matchModules(data: EarlierData): EarlierModules {
  const sizes = data.sizes ?? sumPeaks(data);
  const { path } = page.value.modules;
  const positions = new Map(data.modules.map((name, at) => [name, at] as const));
  const pick = (column: readonly number[]): number[] =>
    path.map((name) => column[positions.get(name) ?? -1] ?? 0);
  const known = {
    recorded: [...(data.communication ? ["wire"] : []), ...sizes.recorded],
    is_new: path.map((name) => !positions.has(name)),
    count: [],
    wire_bytes: [],
    parameters: pick(sizes.total_parameters),
    local_bytes: pick(sizes.total_local_bytes),
    peak_bytes: pick(sizes.total_peak_bytes),
    gone: listGone(data.modules).map((paths): GoneModules => {
      const sum = (column: readonly number[]): number =>
        paths.reduce((total, name) => total + (column[positions.get(name)!] ?? 0), 0);
      return {
        parent: findNearest(parentOf(paths[0]!)),
        name: nameAll(paths),
        paths,
        num_modules: paths.length,
        count: 0,
        wire_bytes: 0,
        parameters: sum(sizes.total_parameters),
        local_bytes: sum(sizes.total_local_bytes),
        peak_bytes: sum(sizes.total_peak_bytes),
      };
    }),
  };
  return filterTraffic(known, data);
}

function parentOf(name: string): string {
  return name.slice(0, Math.max(name.lastIndexOf("."), 0));
}

/** The topmost modules that the page does not have; those that differ in a number are a group. */
function listGone(names: readonly string[]): string[][] {
  const groups = new Map<string, string[]>();
  for (const name of names) {
    const isTopmost = name !== "" && (!name.includes(".") || findModule(parentOf(name)) >= 0);
    if (!isTopmost || findModule(name) >= 0) continue;
    const folded = name.replace(/\d+$/, "*");
    groups.set(folded, [...(groups.get(folded) ?? []), name]);
  }
  return [...groups.values()];
}

/** `layers.{4…31}`. */
function nameAll(paths: readonly string[]): string {
  if (paths.length === 1) return paths[0]!;
  const numbers = paths.map((path) => Number(/\d+$/.exec(path)![0]));
  const prefix = paths[0]!.replace(/\d+$/, "");
  return `${prefix}{${Math.min(...numbers)}…${Math.max(...numbers)}}`;
}

/** Bytes at the peak by module, children included, of a recording; it has no other sizes. */
function sumPeaks({ modules, memory }: EarlierData) {
  const sizes = new Map<string, number>();
  for (const { module, num_bytes: numBytes } of memory[0]?.at_peak ?? []) {
    if (module < 0) continue;
    for (let name = modules[module]!; ; name = parentOf(name)) {
      sizes.set(name, (sizes.get(name) ?? 0) + numBytes);
      if (!name) break;
    }
  }
  return {
    recorded: memory.length ? ["peak"] : [],
    total_parameters: [],
    total_local_bytes: [],
    total_peak_bytes: modules.map((name) => sizes.get(name) ?? 0),
  };
}
