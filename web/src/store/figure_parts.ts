/** Figures of views whose parts Python lists, of what is selected. */
import type { Figure, FigureParts } from "../page";
import { includesRank } from "./ranks";
import { type Facet, selectedFacetName, selection } from "./selection";

export const NO_PARTS: FigureParts = {
  ...{ figure: [], modules: [], axis: [], kind: [], phases: [], ranks: [], value: [] },
};

/** The figures of one page, with what they are sums of. */
export interface SummedFigures {
  readonly figures: readonly Figure[];
  readonly parts: FigureParts;
  readonly isModuleSelected: (module: number) => boolean;
}

/** A figure that is no sum of parts. */
export function makeFigure(
  view: string,
  group: string,
  label: string,
  unit: string,
  value: number,
): Figure {
  return { view, group, label, unit, value, follows: [] };
}

export function followsAll(figure: Figure, facets: readonly Facet[]): boolean {
  return facets.every((facet) => figure.follows.includes(facet));
}

/** The figures that can be filtered by all of these facets, summed of their selected parts. */
export function sumSelected(
  { figures, parts, isModuleSelected }: SummedFigures,
  facets: readonly Facet[],
): Figure[] {
  if (!facets.length) return [...figures];
  const sums = new Map<number, number>();
  const isSelected = makePartFilter(parts, isModuleSelected, facets);
  parts.figure.forEach((figure, row) => {
    if (isSelected(row)) sums.set(figure, (sums.get(figure) ?? 0) + parts.value[row]!);
  });
  return figures.flatMap((figure, at) =>
    followsAll(figure, facets) ? [{ ...figure, value: sums.get(at) ?? 0 }] : [],
  );
}

function makePartFilter(
  { modules, axis, kind, phases, ranks }: FigureParts,
  isModuleSelected: (module: number) => boolean,
  facets: readonly Facet[],
): (row: number) => boolean {
  const phase = selectedFacetName("phase") ?? "";
  const { rank } = selection.value;
  const tests: Readonly<Partial<Record<Facet, (row: number) => boolean>>> = {
    module: (row) => modules[row]?.some(isModuleSelected) ?? false,
    axis: (row) => axis[row] === selectedFacetName("axis"),
    kind: (row) => kind[row] === selectedFacetName("kind"),
    phase: (row) => phases[row]!.split(" ").includes(phase),
    rank: (row) => !/\d/.test(ranks[row]!) || includesRank(ranks[row]!, rank),
  };
  const used = facets.flatMap((facet) => tests[facet] ?? []);
  return (row) => used.every((isMatch) => isMatch(row));
}
