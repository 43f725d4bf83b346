/** Figures of a view in both recordings, of what is selected as far as both can be filtered by it. */
import { computed } from "@preact/signals";
import type { EarlierCollectives, EarlierCurve, Figure, MemoryCurve } from "../page";
import { type Earlier, earlier } from "./earlier";
import { followsAll, makeFigure, NO_PARTS, sumSelected } from "./figure_parts";
import { hasModuleSelection, isInSelection, isNameSelected } from "./modules";
import { page } from "./page";
import {
  FACETS,
  type Facet,
  isRankSelected,
  makeRowFilter,
  selectedFacetName,
  selectedFacets,
  selectedRankSet,
  selection,
} from "./selection";
import { groupRows, NO_TRAFFIC, type TrafficColumn } from "./traffic";

export interface ComparedFigures {
  readonly before: readonly Figure[];
  readonly after: readonly Figure[];
  readonly follows: readonly Facet[]; // what both are filtered by
  readonly numHidden: number; // figures of the page that cannot be filtered by all of these
}

/** The figures of a view, or none if nothing is compared. */
export function listComparedFigures(view: string): ComparedFigures {
  const compared = earlier.value;
  if (!compared) return { before: [], after: [], follows: FACETS, numHidden: 0 };
  if (view === "communication") return compareTraffic(compared);
  return view === "memory" ? compareMemory(compared) : compareParts(view, compared);
}

/** Figures of other views, which are sums of parts that can be selected. */
function compareParts(view: string, { figures, data }: Earlier): ComparedFigures {
  const isOfView = (figure: Figure): boolean => figure.view === view;
  const names = data?.modules ?? [];
  const facets = chooseFacets(figures.filter(isOfView));
  const before = sumSelected(
    {
      figures,
      parts: data?.figure_parts ?? NO_PARTS,
      isModuleSelected: (module) => isNameSelected(names[module]),
    },
    facets,
  );
  const { figures: all, figure_parts: parts } = page.value;
  const after = sumSelected({ figures: all, parts, isModuleSelected: isInSelection }, facets);
  return {
    before: before.filter(isOfView),
    after: after.filter(isOfView),
    follows: facets,
    numHidden: all.filter((figure) => isOfView(figure) && !followsAll(figure, facets)).length,
  };
}

/** The selected facets by which some figures can be filtered together: as many as possible. */
function chooseFacets(figures: readonly Figure[]): readonly Facet[] {
  let chosen: readonly Facet[] = [];
  for (const { follows } of figures) {
    const facets = selectedFacets.value.filter((facet) => follows.includes(facet));
    if (facets.length > chosen.length) chosen = facets;
  }
  return chosen;
}

/** Lines move between versions of a program, and so do the positions of collectives. */
const NEVER_COMPARED: readonly Facet[] = ["line", "range"];

/** Facets that the collectives of both recordings can be filtered by. */
export const comparedFacets = computed<readonly Facet[]>(() => {
  const communication = earlier.value?.data?.communication;
  const isCompared = (facet: Facet): boolean => {
    if (facet === "cause") return Boolean(communication?.causes.length);
    if (facet === "step") return Boolean(communication?.num_steps);
    return !NEVER_COMPARED.includes(facet);
  };
  return FACETS.filter(isCompared);
});

function compareTraffic({ data }: Earlier): ComparedFigures {
  const [before, after] = [data?.communication, page.value.communication];
  return {
    before: before ? listTrafficFigures(before, makeEarlierFilter()) : [],
    after: after?.traffic.count.length ? listTrafficFigures(after, makePageFilter()) : [],
    follows: comparedFacets.value,
    numHidden: 0,
  };
}

/** Whether a row of the page's collectives is selected, by what is compared. */
function makePageFilter(): (row: number) => boolean {
  const { traffic } = page.value.communication!;
  const ignored = FACETS.filter((facet) => !comparedFacets.value.includes(facet));
  const isSelected = makeRowFilter(traffic, ignored);
  if (selection.value.rank < 0) return isSelected;
  return (row) => traffic.rank_set[row] === selectedRankSet.value && isSelected(row);
}

/** The same of a row of the earlier recording's collectives; the module can be ignored. */
export function makeEarlierFilter(ignored: readonly Facet[] = []): (row: number) => boolean {
  const { communication, modules } = earlier.value!.data!;
  const { axes, kinds, phases, causes, dtypes, ranks, traffic } = communication!;
  const tests: ((row: number) => boolean)[] = [];
  const lists = { axis: axes, kind: kinds, phase: phases, cause: causes, dtype: dtypes };
  for (const facet of ["axis", "kind", "phase", "cause", "dtype"] as const) {
    const name = comparedFacets.value.includes(facet) ? selectedFacetName(facet) : null;
    if (name === null) continue;
    const position = lists[facet].indexOf(name); // -1, which no row has, if there is none
    tests.push((row) => position >= 0 && traffic[facet][row] === position);
  }
  const { step } = selection.value;
  if (step > 0 && comparedFacets.value.includes("step")) {
    tests.push((row) => traffic.step[row] === step);
  }
  if (selection.value.rank >= 0) {
    const isSelectedSet = ranks.map((row) => isRankSelected(row.ranks));
    tests.push((row) => isSelectedSet[traffic.rank_set[row]!]!);
  }
  if (hasModuleSelection.value && !ignored.includes("module")) {
    const marks = modules.map(isNameSelected);
    tests.push((row) => marks[traffic.owner[row]!] ?? false);
  }
  return (row) => tests.every((isMatch) => isMatch(row));
}

type Collectives = Pick<EarlierCollectives, "axes" | "kinds" | "phases" | "causes" | "traffic">;

const SENT = "bytes sent per rank (ring estimate)";
const ISSUED = "collectives per rank";

/** Sums, each of the rank that sends most in it, with the names that Python gives them. */
export function listTrafficFigures(
  { axes, kinds, phases, causes, traffic }: Collectives,
  isIncluded: (row: number) => boolean,
): Figure[] {
  const name = (names: readonly string[], at: number): string => names[at] ?? "not listed";
  const what = ([kind, axis]: readonly number[]): string =>
    `${name(kinds, kind!)}[${name(axes, axis!)}]`;
  const groups: readonly [string, TrafficColumn[], (values: readonly number[]) => string][] = [
    ["", ["kind", "axis"], what],
    [", by phase", ["phase"], ([phase]) => name(phases, phase!)],
    [
      ", by kind, axis and phase",
      ["kind", "axis", "phase"],
      (values) => `${what(values)} in ${name(phases, values[2]!)}`,
    ],
    [", by cause", ["cause"], ([cause]) => name(causes, cause!)],
  ];
  const figures = (by: string, label: string, sum: typeof NO_TRAFFIC): Figure[] => [
    makeFigure("communication", SENT + by, label, "bytes", sum.wire_bytes),
    makeFigure("communication", ISSUED + by, label, "count", sum.count),
  ];
  return [
    ...figures("", "all", groupRows(traffic, [], isIncluded)[0] ?? NO_TRAFFIC),
    ...groups
      .filter(([by]) => by !== ", by cause" || causes.length)
      .flatMap(([by, columns, label]) =>
        groupRows(traffic, columns, isIncluded).flatMap((group) =>
          figures(by, label(group.values), group),
        ),
      ),
  ];
}

/** Memory of the selected rank, or of the rank that needs most; of the selected modules. */
function compareMemory({ data }: Earlier): ComparedFigures {
  const curves = [data?.memory ?? [], page.value.memory] as const;
  const chosen = curves.map((ofSide) => ofSide.find(({ ranks }) => isRankSelected(ranks)));
  // Of ranks other than the one that needs most, a page lists the largest entries only.
  const hasEntries = chosen.every((curve, side) => curve === curves[side]![0]);
  const names = data?.modules ?? [];
  const [before, after] = chosen;
  return {
    before: before
      ? listMemoryFigures(before, hasEntries, (module) => isNameSelected(names[module]))
      : [],
    after: after ? listMemoryFigures(after, hasEntries, isInSelection) : [],
    follows: hasEntries ? ["module", "rank"] : ["rank"],
    numHidden: 0,
  };
}

export function listMemoryFigures(
  curve: EarlierCurve | MemoryCurve,
  hasEntries: boolean,
  isIncluded: (module: number) => boolean,
): Figure[] {
  const figures = (group: string, values: Iterable<[string, number | null]>): Figure[] =>
    [...values].flatMap(([label, value]) =>
      value === null ? [] : [makeFigure("memory", group, label, "bytes", value)],
    );
  const kinds = new Map(curve.kinds.map((kind) => [kind, 0]));
  for (const { kind, module, num_bytes: numBytes } of curve.at_peak) {
    const name = curve.kinds[kind]!;
    if (isIncluded(module)) kinds.set(name, kinds.get(name)! + numBytes);
  }
  const ofRank = figures("most on a rank", [
    ["peak of a step", curve.peak_bytes],
    ["peak of the first step", curve.first_peak_bytes],
    ["reserved", curve.reserved_bytes],
    ["needed on a device", curve.needed_bytes],
  ]);
  return [
    ...(hasEntries && hasModuleSelection.value ? [] : ofRank),
    ...(hasEntries ? figures("in use at the peak", kinds) : []),
  ];
}
