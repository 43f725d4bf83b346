/** Groups of identical ranks, the busiest first: a table, or a sentence if all ranks are identical. */
import { useMemo } from "preact/hooks";
import type { Communication, RankRow } from "../../page";
import { Bar } from "../../parts/bar";
import { Panel } from "../../parts/panel";
import { type Column, Table } from "../../parts/table";
import { formatBytes, formatNumber, pluralize } from "../../parts/units";

export function Ranks({ communication }: { readonly communication: Communication }) {
  const { ranks, matrix_summary: summary } = communication;
  const columns = useMemo(() => makeColumns(ranks), [ranks]);
  if (!ranks.length) return null;
  if (ranks.length === 1) return <p class="comm-sentence">{summary || describe(ranks)}</p>;
  return (
    <Panel title="Identical ranks" note={describe(ranks)}>
      <Table
        label="identical ranks"
        numRows={ranks.length}
        columns={columns}
        empty="No rank issued anything."
        height="18rem"
      />
    </Panel>
  );
}

function describe(ranks: readonly RankRow[]): string {
  const numRanks = ranks.reduce((sum, row) => sum + row.num_ranks, 0);
  if (numRanks === 1) return "One rank was recorded.";
  return ranks.length === 1
    ? `All ${formatNumber(numRanks)} recorded ranks issued the same collectives.`
    : `${formatNumber(numRanks)} recorded ranks issued ${pluralize(ranks.length, "different list")} of collectives.`;
}

function makeColumns(ranks: readonly RankRow[]): Column[] {
  const max = Math.max(0, ...ranks.map((row) => row.wire_bytes));
  const at = (row: number): RankRow => ranks[row]!;
  return [
    {
      id: "ranks",
      title: "Ranks",
      width: 8,
      grow: 2,
      isText: true,
      value: (row) => at(row).ranks,
    },
    {
      id: "number",
      title: "Number",
      width: 5.5,
      align: "end",
      value: (row) => at(row).num_ranks,
      cell: (row) => formatNumber(at(row).num_ranks),
    },
    {
      id: "count",
      title: "Collectives",
      hint: "that one of them issued",
      width: 7,
      align: "end",
      value: (row) => at(row).count,
      cell: (row) => formatNumber(at(row).count),
    },
    {
      id: "wire",
      title: "Sent",
      hint: "bytes that one of them sends (ring estimate)",
      width: 10,
      grow: 1,
      align: "end",
      value: (row) => at(row).wire_bytes,
      cell: (row) => (
        <Bar value={at(row).wire_bytes} max={max} text={formatBytes(at(row).wire_bytes)} />
      ),
    },
  ];
}
