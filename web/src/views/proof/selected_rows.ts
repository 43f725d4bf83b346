/** What is selected of the results of parity checks and of parallel programs. */
import type { DivergenceItem, FallbackRow, InsertedRow, VerdictTable } from "../../page";
import { isInSelection } from "../../store/modules";
import {
  type Facet,
  isRankSelected,
  isSourceSelected,
  selectedFacetName,
} from "../../store/selection";

/** Facets that each kind of row can be filtered by. */
export const FOLLOWED: Readonly<
  Record<"tensors" | "divergences" | "inserted" | "fallbacks", readonly Facet[]>
> = {
  tensors: ["module", "phase", "rank"],
  divergences: ["module", "phase", "line"],
  inserted: ["module", "axis", "kind", "phase", "line", "rank"], // all ranks have the same
  fallbacks: ["module", "axis", "line", "rank"],
};

/** The phase that computes a tensor; a parameter is compared before the run. */
const PHASE_OF: Readonly<Record<string, string>> = {
  output: "forward",
  buffer: "forward",
  gradient: "backward",
};

export function isTensorSelected(tensors: VerdictTable, row: number): boolean {
  return (
    isInSelection(tensors.module[row]!) &&
    isRankSelected(tensors.ranks[row]!) &&
    isPhaseSelected(PHASE_OF[tensors.kind[row]!] ?? "")
  );
}

/** `3 of 12 tensors differ`: of those that are selected. */
export function countDiffering(tensors: VerdictTable): {
  readonly all: number;
  readonly bad: number;
} {
  const rows = [...tensors.name.keys()].filter((row) => isTensorSelected(tensors, row));
  return { all: rows.length, bad: rows.filter((row) => !tensors.is_fine[row]).length };
}

export function isDivergenceSelected({ module, phase, source }: DivergenceItem): boolean {
  return isInSelection(module) && isPhaseSelected(phase) && isSourceSelected(source);
}

function isPhaseSelected(phase: string): boolean {
  return isNameSelected("phase", phase);
}

function isNameSelected(facet: "axis" | "kind" | "phase", name: string): boolean {
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
