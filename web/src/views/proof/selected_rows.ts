/** What is selected of the results of parity checks and of parallel programs. */
import type { DivergenceItem, FallbackRow, InsertedRow, TensorTable } from "../../page";
import type { KnownNames } from "../../store/known_names";
import { isInSelection } from "../../store/modules";
import {
  type Facet,
  isRankSelected,
  isSourceSelected,
  isStepSelected,
  selectedFacetName,
} from "../../store/selection";

/** Facets that each kind of row can be filtered by. */
export const FOLLOWED: Readonly<
  Record<"tensors" | "divergences" | "inserted" | "fallbacks" | "variations", readonly Facet[]>
> = {
  tensors: ["module", "phase", "dtype", "rank", "step"],
  divergences: ["module", "phase", "line"],
  inserted: ["module", "axis", "kind", "phase", "line", "rank"], // all ranks have the same
  fallbacks: ["module", "axis", "line", "rank"],
  variations: ["line", "rank"],
};

export function isTensorSelected(tensors: TensorTable, row: number): boolean {
  return (
    isInSelection(tensors.module[row]!) &&
    isRankSelected(tensors.ranks[row]!) &&
    isNameSelected("phase", tensors.phase[row]!) &&
    isNameSelected("dtype", tensors.dtype[row]!) &&
    isStepSelected(tensors.step[row]!)
  );
}

/** `3 of 12 tensors differ`: of those that are selected. */
export function countDiffering(tensors: TensorTable): {
  readonly all: number;
  readonly bad: number;
} {
  const rows = [...tensors.name.keys()].filter((row) => isTensorSelected(tensors, row));
  return { all: rows.length, bad: rows.filter((row) => !tensors.is_fine[row]).length };
}

export function isDivergenceSelected({ module, phase, source }: DivergenceItem): boolean {
  return isInSelection(module) && isNameSelected("phase", phase) && isSourceSelected(source);
}

function isNameSelected(facet: keyof KnownNames, name: string): boolean {
  const selected = selectedFacetName(facet);
  return selected === null || selected === name;
}

/** Entries of a row that are selected, as positions in its `modules`. */
export function listInserted(row: InsertedRow): number[] {
  const isSelected =
    isNameSelected("axis", row.axis) &&
    isNameSelected("kind", row.kind) &&
    isNameSelected("phase", row.phase);
  return isSelected ? listEntries(row) : [];
}

export function listFallbacks(row: FallbackRow): number[] {
  return isNameSelected("axis", row.axis) ? listEntries(row) : [];
}

function listEntries({ modules, sources }: Pick<InsertedRow, "modules" | "sources">): number[] {
  return [...modules.keys()].filter(
    (at) => isInSelection(modules[at]!) && isSourceSelected(sources[at]!),
  );
}
