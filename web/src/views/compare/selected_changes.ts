/** Which changes are selected: those that are not about collectives have no axis, kind or phase. */
import type { ChangeRow } from "../../page";
import { joinNames } from "../../parts/unfollowed";
import { formatNumber } from "../../parts/units";
import { isFoldedRowInSelection } from "../../store/modules";
import {
  type Facet,
  isRankSelected,
  isSourceSelected,
  selectedFacetName,
  selectedFacets,
} from "../../store/selection";

/** Facets that changes can be filtered by; the table filters them by module. */
export const FOLLOWED: readonly Facet[] = ["module", "axis", "kind", "phase", "line", "rank"];

const NAMES = ["axis", "kind", "phase"] as const;

export function isChangeSelected(change: ChangeRow): boolean {
  return (
    NAMES.every((facet) => {
      const name = selectedFacetName(facet);
      return name === null || change[facet] === name;
    }) &&
    isSourceSelected(change.source) &&
    isRankSelected(change.ranks)
  );
}

/** The same, by module too. */
export function isWhollySelected(change: ChangeRow): boolean {
  return isFoldedRowInSelection(change.module) && isChangeSelected(change);
}

/** How many changes have no value of a selected facet, and are not shown for that. */
export function describeHidden(changes: readonly ChangeRow[]): string {
  const lacking: Readonly<Partial<Record<Facet, (change: ChangeRow) => boolean>>> = {
    module: ({ module }) => module < 0,
    axis: ({ axis }) => !axis,
    kind: ({ kind }) => !kind,
    phase: ({ phase }) => !phase,
    line: ({ source }) => source < 0,
  };
  const facets = selectedFacets.value.filter((facet) => lacking[facet]);
  const number = changes.filter((row) => facets.some((facet) => lacking[facet]!(row))).length;
  if (!number) return "";
  const verb = number === 1 ? "has" : "have";
  return ` ${formatNumber(number)} that ${verb} no ${joinNames(facets)} ${number === 1 ? "is" : "are"} not shown.`;
}
