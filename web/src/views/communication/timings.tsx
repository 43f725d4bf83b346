/** Table of the sums of spans by name, the longest first. */
import { useMemo } from "preact/hooks";
import type { Timing } from "../../page";
import { Bar } from "../../parts/bar";
import { FacetLink } from "../../parts/facet_link";
import { Panel } from "../../parts/panel";
import { type Column, Table } from "../../parts/table";
import { formatCount, formatDuration } from "../../parts/units";
import { selection } from "../../store/selection";

interface Props {
  readonly timings: readonly Timing[];
  readonly clock: string; // a caveat on the times
}

export function Timings({ timings, clock }: Props) {
  const { rank } = selection.value;
  const shown = useMemo(() => listRank(timings, rank), [timings, rank]);
  const columns = useMemo(() => makeColumns(shown), [shown]);
  if (!timings.length) return null;
  const whose = shown === timings ? "Of the rank that took longest" : `Of rank ${rank}`;
  return (
    <Panel
      title="Phases"
      follows={hasRanks(timings) ? ["rank"] : []}
      note={`${whose}; own: excluding phases within it${clock && `; ${clock}`}.`}
    >
      <Table
        label="phases"
        numRows={shown.length}
        columns={columns}
        empty={rank < 0 ? "Nothing was timed." : `Nothing was timed on rank ${rank}.`}
        height="18rem"
      />
    </Panel>
  );
}

function hasRanks(timings: readonly Timing[]): boolean {
  return timings.some(({ ranks }) => ranks.length > 0);
}

/** The sums of the selected rank, where they are known; else those of the slowest. */
function listRank(timings: readonly Timing[], rank: number): readonly Timing[] {
  if (rank < 0 || !hasRanks(timings)) return timings;
  return timings.flatMap((timing) =>
    timing.ranks
      .filter((ofRank) => ofRank.rank === rank)
      .map(({ rank: _, ...sums }) => ({ ...timing, ...sums })),
  );
}

function makeColumns(timings: readonly Timing[]): Column[] {
  const max = Math.max(0, ...timings.map((timing) => timing.total_ns));
  const at = (row: number): Timing => timings[row]!;
  const time = (id: string, title: string, read: (timing: Timing) => number): Column => ({
    id,
    title,
    width: 6,
    align: "end",
    value: (row) => read(at(row)),
    cell: (row) => formatDuration(read(at(row))),
  });
  return [
    { id: "name", title: "Name", width: 9, grow: 2, isText: true, value: (row) => at(row).name },
    { id: "clock", title: "Clock", width: 5, isText: true, value: (row) => at(row).device },
    {
      id: "total",
      title: "Total",
      width: 10,
      grow: 1,
      align: "end",
      value: (row) => at(row).total_ns,
      cell: (row) => (
        <Bar value={at(row).total_ns} max={max} text={formatDuration(at(row).total_ns)} />
      ),
    },
    time("self", "Own", (timing) => timing.self_ns),
    time("max", "Longest", (timing) => timing.max_ns),
    {
      id: "count",
      title: "Times",
      width: 5,
      align: "end",
      value: (row) => at(row).count,
      cell: (row) => formatCount(at(row).count),
    },
    {
      id: "slowest",
      title: "Slowest",
      hint: "the rank that took longest",
      width: 6,
      align: "end",
      value: (row) => at(row).slowest,
      cell: (row) => (
        <FacetLink facet="rank" value={String(at(row).slowest)}>
          rank {at(row).slowest}
        </FacetLink>
      ),
    },
  ];
}
