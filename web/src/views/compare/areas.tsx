/** Totals of each area in both recordings; clicking an area shows only its changes. */
import type { AreaSum, Comparison } from "../../page";
import { formatBytes, formatNumber, pluralize } from "../../parts/units";
import { comparedFacets, listComparedFigures } from "../../store/compared_figures";
import { param, setParam } from "../../store/route";
import { selectedFacets } from "../../store/selection";
import { isWhollySelected } from "./selected_changes";

export function Areas({ comparison }: { comparison: Comparison }) {
  const requestedArea = param("area");
  return (
    <div class="areas">
      {comparison.areas.map((area, at) => {
        const count = area.num_added + area.num_gone + area.num_changed;
        return (
          <button
            type="button"
            key={area.name}
            class={count ? "area-sum" : "area-sum area-same"}
            aria-pressed={requestedArea === area.name}
            disabled={!count}
            onClick={() => setParam("area", requestedArea === area.name ? null : area.name)}
          >
            <span class="area-name">{area.name}</span>
            <span class="area-figures">
              <Totals area={area} count={count} />
            </span>
            <span class="area-counts">{describeCounts(comparison, at)}</span>
          </button>
        );
      })}
    </div>
  );
}

function Totals({ area, count }: { area: AreaSum; count: number }) {
  const [before, after] = sumSelected(area.name) ?? [area.before, area.after];
  if (!before && !after) return <>{pluralize(count, "change")}</>;
  return (
    <>
      {before || "none"} <span class="dim">→</span> {after || "none"}
    </>
  );
}

/** Collectives or bytes of what is selected in both recordings; null if that is not summed here. */
function sumSelected(area: string): readonly [string, string] | null {
  const unit = { collectives: "count", bytes: "bytes" }[area];
  const isFiltered = selectedFacets.value.some((facet) => comparedFacets.value.includes(facet));
  if (!unit || !isFiltered) return null;
  const { before, after } = listComparedFigures("communication");
  const [first, second] = [before, after].map(
    (figures) => figures.find((item) => item.label === "all" && item.unit === unit)?.value ?? 0,
  );
  const format = unit === "bytes" ? formatBytes : formatNumber;
  return [format(first!), format(second!)];
}

function describeCounts({ areas, changes }: Comparison, at: number): string {
  const area = areas[at]!;
  if (selectedFacets.value.length) {
    const rows = changes.filter((change) => change.area === at && isWhollySelected(change));
    const scope = sumSelected(area.name) ? "" : "of the whole run; ";
    return `${scope}${rows.length ? pluralize(rows.length, "row") : "nothing"} selected`;
  }
  const counts = [
    area.num_added && `${formatNumber(area.num_added)} added`,
    area.num_gone && `${formatNumber(area.num_gone)} gone`,
    area.num_changed && `${formatNumber(area.num_changed)} changed`,
  ].filter(Boolean);
  if (counts.length) return counts.join(", ");
  return area.before === area.after ? "the same" : "shown in other rows";
}
