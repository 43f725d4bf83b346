/** What is selected in every view, as chips, and what share of all traffic it is. */
import { shortenPath } from "../parts/source_line";
import { formatBytes, formatDuration, formatNumber, formatShare, pluralize } from "../parts/units";
import { moduleHref, selected, selectedName } from "../store/modules";
import { page } from "../store/page";
import {
  type CallRange,
  clear,
  FACETS,
  type Facet,
  nameFacet,
  numSteps,
  selectedFacets,
  selectedRankSet,
  selectedText,
  selection,
} from "../store/selection";
import { hasAllCalls, isOfSeveralRanks, selectedTraffic, totalTraffic } from "../store/traffic";

export function clearSelection(): void {
  if (selectedFacets.value.length) clear(...FACETS);
}

export function SelectionBar() {
  const facets = selectedFacets.value;
  if (!facets.length) return null;
  return (
    <section class="selection-bar" aria-label="selection">
      <ul class="chips">
        {facets.map((facet) => (
          <li key={facet}>
            <SelectionChip facet={facet} />
          </li>
        ))}
      </ul>
      <SelectionShare />
      <button
        type="button"
        class="text-button"
        title="Clear the selection"
        onClick={clearSelection}
      >
        clear <kbd>Esc</kbd>
      </button>
    </section>
  );
}

function SelectionChip({ facet }: { facet: Facet }) {
  const text = describeFacet(facet);
  return (
    <span class="selection">
      <span class="selection-facet">{nameFacet(facet)}</span>
      {facet === "module" && selected.value >= 0 ? (
        <a href={moduleHref(selected.value, "modules")} title={`${text}: show it in the tree`}>
          {/* The end of a path is more informative than its beginning. */}
          <bdi>{text}</bdi>
        </a>
      ) : (
        <span class="selection-value" title={selectedText(facet)}>
          <bdi>{text}</bdi>
        </span>
      )}
      <button
        type="button"
        title={`Select every ${nameFacet(facet)}`}
        aria-label={`Clear ${nameFacet(facet)}`}
        onClick={() => clear(facet)}
      >
        ×
      </button>
    </span>
  );
}

function describeFacet(facet: Facet): string {
  const { rank, range, line, step } = selection.value;
  if (facet === "module") return selectedName.value;
  if (facet === "line") return shortenPath(line);
  if (facet === "range" && range) return describeRange(range);
  if (facet === "step") return `${formatNumber(step)} of ${formatNumber(numSteps.value)}`;
  if (facet === "rank") {
    const row = page.value.communication?.ranks[selectedRankSet.value];
    return row && row.num_ranks > 1 ? `${rank}, the same as ${row.ranks}` : String(rank);
  }
  return selectedText(facet);
}

function describeRange({ along, low, high }: CallRange): string {
  if (along === "time") return `${formatDuration(low)} – ${formatDuration(high)}`;
  return `collectives ${formatNumber(low)} – ${formatNumber(high)} of each rank`;
}

/** What one rank issues of it, and what a range or a very large recording leaves out. */
function SelectionShare() {
  const { communication } = page.value;
  if (!communication?.traffic.count.length) return null;
  const [part, all] = [selectedTraffic.value, totalTraffic.value];
  const { rank, range } = selection.value;
  if (rank >= 0 && selectedRankSet.value < 0) {
    return (
      <p class="selection-share" role="status">
        <b>Rank {formatNumber(rank)} was not recorded</b>
      </p>
    );
  }
  const whose = rank >= 0 ? `rank ${rank}` : isOfSeveralRanks.value ? "the busiest rank" : "a rank";
  const notes = [
    range &&
      !hasAllCalls.value &&
      `The range covers only calls that are listed: ${communication.left_out}`,
    communication.traffic_note,
  ];
  return (
    <p class="selection-share" role="status">
      <b>{pluralize(part.count, "collective")}</b>
      {", "}
      <b>{formatBytes(part.wire_bytes)}</b> sent
      <span class="dim">
        {` by ${whose}: ${formatShare(part.wire_bytes, all.wire_bytes)} of ${formatBytes(all.wire_bytes)}`}
        {rank >= 0 && communication.ranks.length > 1 && " that the busiest rank sends"}
        {notes.filter(Boolean).map((note) => `. ${note}`)}
      </span>
    </p>
  );
}
