/** Groups of identical ranks, the busiest first: a table, or a sentence if all ranks are identical. */
import { useCallback, useMemo } from "preact/hooks";
import type { Communication, RankRow } from "../../page";
import { Bar } from "../../parts/bar";
import { FacetLink } from "../../parts/facet_link";
import { Panel } from "../../parts/panel";
import { type Column, Table } from "../../parts/table";
import { formatBytes, formatNumber, pluralize } from "../../parts/units";
import { selectedFacets, selectedRankSet, selection } from "../../store/selection";
import { NO_TRAFFIC, sumRows, type TrafficSum } from "../../store/traffic";

/** Follows the sentence on bytes between ranks, which Python has made of all collectives. */
const OF_ALL = " Of all collectives, whatever is selected.";

export function Ranks({ communication }: { communication: Communication }) {
  const { ranks } = communication;
  const figures = sumRankSets(ranks.length);
  const columns = useMemo(() => makeColumns(ranks, figures), [ranks, figures]);
  const [rank, rankSet] = [selection.value.rank, selectedRankSet.value];
  const isShown = useCallback((row: number) => rank < 0 || row === rankSet, [rank, rankSet]);
  if (!ranks.length) return null;
  if (ranks.length === 1) {
    const { matrix_summary } = communication;
    const scope = matrix_summary && selectedFacets.value.length ? OF_ALL : "";
    return (
      <p class="comm-sentence">
        {matrix_summary || describe(ranks)}
        {scope}
      </p>
    );
  }
  return (
    <Panel title="Identical ranks" note={describe(ranks)}>
      <Table
        label="identical ranks"
        numRows={ranks.length}
        columns={columns}
        sort={{ column: "wire", isDescending: true }}
        isShown={isShown}
        empty="No rank issued anything."
        height="18rem"
      />
    </Panel>
  );
}

/** What is selected, of one rank of each set. */
function sumRankSets(numRankSets: number): readonly TrafficSum[] {
  const sums = new Map(sumRows(["rank_set"]).map((sum) => [sum.values[0], sum]));
  return Array.from({ length: numRankSets }, (_, rankSet) => sums.get(rankSet) ?? NO_TRAFFIC);
}

function describe(ranks: readonly RankRow[]): string {
  const numRanks = ranks.reduce((sum, row) => sum + row.num_ranks, 0);
  if (numRanks === 1) return "One rank was recorded.";
  return ranks.length === 1
    ? `All ${formatNumber(numRanks)} recorded ranks issued the same collectives.`
    : `${formatNumber(numRanks)} recorded ranks issued ${pluralize(ranks.length, "different list")} of collectives.`;
}

function makeColumns(ranks: readonly RankRow[], figures: readonly TrafficSum[]): Column[] {
  const max = Math.max(0, ...figures.map(({ wire_bytes }) => wire_bytes));
  const at = (row: number): RankRow => ranks[row]!;
  return [
    {
      id: "ranks",
      title: "Ranks",
      width: 8,
      grow: 2,
      isText: true,
      value: (row) => at(row).ranks,
      cell: (row) => (
        <FacetLink facet="rank" value={String(at(row).example)}>
          {at(row).ranks}
        </FacetLink>
      ),
    },
    {
      id: "number",
      title: "Number",
      width: 5,
      align: "end",
      value: (row) => at(row).num_ranks,
      cell: (row) => formatNumber(at(row).num_ranks),
    },
    {
      id: "count",
      title: "Collectives",
      hint: "that one of them issued",
      width: 6.5,
      align: "end",
      value: (row) => figures[row]!.count,
      cell: (row) => formatNumber(figures[row]!.count),
    },
    {
      id: "wire",
      title: "Sent",
      hint: "bytes that one of them sends (ring estimate)",
      width: 10,
      grow: 1,
      align: "end",
      value: (row) => figures[row]!.wire_bytes,
      cell: (row) => (
        <Bar
          value={figures[row]!.wire_bytes}
          max={max}
          text={formatBytes(figures[row]!.wire_bytes)}
        />
      ),
    },
  ];
}
