/** Table of the sums of spans by name, the longest first. */
import { useMemo } from "preact/hooks";
import type { Timing } from "../../page";
import { Bar } from "../../parts/bar";
import { Panel } from "../../parts/panel";
import { type Column, Table } from "../../parts/table";
import { formatCount, formatDuration } from "../../parts/units";

interface Props {
  readonly timings: readonly Timing[];
  readonly clock: string; // a caveat on the times
}

export function Timings({ timings, clock }: Props) {
  const columns = useMemo(() => makeColumns(timings), [timings]);
  if (!timings.length) return null;
  return (
    <Panel
      title="Phases"
      follows={[]}
      note={`Of the rank that took longest; own: excluding phases within it${clock && `; ${clock}`}.`}
    >
      <Table
        label="phases"
        numRows={timings.length}
        columns={columns}
        empty="Nothing was timed."
        height="18rem"
      />
    </Panel>
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
      cell: (row) => `rank ${at(row).slowest}`,
    },
  ];
}
