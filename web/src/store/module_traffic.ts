/** The selected collectives of each module, of the rank that sends most for it. */
import { computed } from "@preact/signals";
import type { Modules, Traffic } from "../page";
import { page } from "./page";
import {
  compareTraffic,
  groupRows,
  makeTrafficFilter,
  type TrafficSum,
  trafficRows,
} from "./traffic";

/** Figures of one module, all of the same rank; those by phase are in the order of the page's phases. */
export interface ModuleTraffic extends TrafficSum {
  readonly phaseCounts: readonly number[];
  readonly phaseBytes: readonly number[]; // sent
  readonly ownCounts: readonly number[]; // by phase, without children
  readonly ownBytes: readonly number[];
  readonly isUneven: boolean; // whether ranks differ, so that the figures are upper bounds
}

interface Figures {
  count: number;
  input_bytes: number;
  wire_bytes: number;
  phaseCounts: number[];
  phaseBytes: number[];
  ownCounts: number[];
  ownBytes: number[];
  isUneven: boolean;
}

function makeFigures(numPhases: number): Figures {
  const zeros = (): number[] => new Array<number>(numPhases).fill(0);
  return {
    ...{ count: 0, input_bytes: 0, wire_bytes: 0, isUneven: false },
    ...{ phaseCounts: zeros(), phaseBytes: zeros(), ownCounts: zeros(), ownBytes: zeros() },
  };
}

/** For each module of the page; figures of all modules, whichever is selected. */
export const moduleTraffic = computed<readonly ModuleTraffic[]>(() => {
  const numPhases = page.value.communication?.phases.length ?? 0;
  const isSelected = makeTrafficFilter(["module"]);
  return sumModules(page.value.modules, trafficRows.value, numPhases, isSelected);
});

/** Sums rows by module and rank set; each module gets the figures of the set that sends most. */
export function sumModules(
  { path, parent }: Pick<Modules, "path" | "parent">,
  traffic: Traffic,
  numPhases: number,
  isIncluded: (row: number) => boolean,
): ModuleTraffic[] {
  const nothing = makeFigures(numPhases);
  const busiest: Figures[] = path.map(() => nothing);
  const firsts = new Map<number, Figures>(); // of the first rank set that issued something
  let ofRankSet = new Map<number, Figures>();
  const finishRankSet = (): void => {
    for (const [module, figures] of ofRankSet) {
      const first = firsts.get(module) ?? figures;
      firsts.set(module, first);
      const isUneven = busiest[module]!.isUneven || !isSame(first, figures);
      if (compareTraffic(figures, busiest[module]!) > 0) busiest[module] = figures;
      busiest[module]!.isUneven = isUneven;
    }
    ofRankSet = new Map();
  };
  traffic.count.forEach((_, row) => {
    // The rows of a rank set follow each other.
    if (traffic.rank_set[row] !== traffic.rank_set[row - 1]) finishRankSet();
    if (!isIncluded(row)) return;
    const owner = traffic.owner[row]!;
    for (let module = owner; module >= 0; module = parent[module]!) {
      const figures = ofRankSet.get(module) ?? makeFigures(numPhases);
      ofRankSet.set(module, figures);
      addRow(figures, traffic, row, module === owner);
    }
  });
  finishRankSet();
  return busiest;
}

function addRow(figures: Figures, traffic: Traffic, row: number, isOwn: boolean): void {
  const [phase, count] = [traffic.phase[row]!, traffic.count[row]!];
  const wireBytes = traffic.wire_bytes[row]!;
  figures.count += count;
  figures.input_bytes += traffic.input_bytes[row]!;
  figures.wire_bytes += wireBytes;
  figures.phaseCounts[phase]! += count;
  figures.phaseBytes[phase]! += wireBytes;
  if (!isOwn) return;
  figures.ownCounts[phase]! += count;
  figures.ownBytes[phase]! += wireBytes;
}

function isSame(a: TrafficSum, b: TrafficSum): boolean {
  return a.count === b.count && a.input_bytes === b.input_bytes && a.wire_bytes === b.wire_bytes;
}

/** For each module, its own selected collectives without its children's: `2× all_gather[tp]`. */
export const ownCollectives = computed<readonly string[]>(() => {
  const { kinds, axes } = page.value.communication ?? { kinds: [], axes: [] };
  const labels = groupRows(
    trafficRows.value,
    ["rank_set", "owner", "kind", "axis"],
    makeTrafficFilter(["module"]),
  ).map(({ values: [rankSet, owner, kind, axis], count }) => ({
    rankSet: rankSet!,
    owner: owner!,
    kind: kinds[kind!]!,
    axis: axes[axis!]!,
    count,
  }));
  labels.sort(
    (a, b) => a.rankSet - b.rankSet || compareNames(a.kind, b.kind) || compareNames(a.axis, b.axis),
  );
  const counts = page.value.modules.path.map(() => new Map<string, number>());
  for (const { owner, kind, axis, count } of labels) {
    const label = `${kind}[${axis}]`;
    counts[owner]?.set(label, Math.max(counts[owner].get(label) ?? 0, count));
  }
  return counts.map((byLabel) =>
    [...byLabel].map(([label, count]) => `${count}× ${label}`).join(", "),
  );
});

function compareNames(a: string, b: string): number {
  return a === b ? 0 : a < b ? -1 : 1;
}
