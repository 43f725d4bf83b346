/** Which parameters are selected: by module, rank, dtype, and the mesh axis that divides them. */
import type { Parameters } from "../../page";
import { isInSelection } from "../../store/modules";
import { type Facet, isRankSelected, selectedFacetName } from "../../store/selection";
import { hasAxis, isOnAxis } from "./parameter_filters";

/** The selected axis; null if no placement names it, and parameters do not follow it. */
export function axisOf(parameters: Parameters): string | null {
  const axis = selectedFacetName("axis");
  return axis !== null && hasAxis(parameters, axis) ? axis : null;
}

/** What parameters are filtered by. */
export function listFollowed(parameters: Parameters): readonly Facet[] {
  const facets: readonly Facet[] = ["module", "rank", "dtype"];
  return axisOf(parameters) === null ? facets : [...facets, "axis"];
}

export function makeParameterFilter(parameters: Parameters): (row: number) => boolean {
  const [axis, dtype] = [axisOf(parameters), selectedFacetName("dtype")];
  return (row) =>
    isInSelection(parameters.module[row]!) &&
    isRankSelected(parameters.ranks[row]!) &&
    (axis === null || isOnAxis(parameters, row, axis)) &&
    (dtype === null || parameters.dtype[row] === dtype);
}
