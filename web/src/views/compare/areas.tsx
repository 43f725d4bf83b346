/** Totals of each area in both recordings; clicking an area shows only its changes. */
import { useRef } from "preact/hooks";
import type { AreaSum, Comparison } from "../../page";
import { countColumns } from "../../parts/tile_columns";
import { formatBytes, formatNumber, pluralize } from "../../parts/units";
import { useSize } from "../../parts/use_size";
import { comparedFacets, listComparedFigures } from "../../store/compared_figures";
import { param, setParam } from "../../store/route";
import { selectedFacets } from "../../store/selection";
import { isWhollySelected } from "./selected_changes";

export function Areas({ comparison }: { comparison: Comparison }) {
  const requestedArea = param("area");
  const box = useRef<HTMLDivElement>(null);
  const { width } = useSize(box);
  const numColumns = countColumns(comparison.areas.length, width, { narrowColumns: 2 });
  return (
    <div class="areas" ref={box} style={{ "--columns": numColumns }}>
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
  if (before === after) return <>{after}</>;
  return (
    <>
      <span>{before || "none"}</span> <span class="dim">→</span> <span>{after || "none"}</span>
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
