/** Table of all collectives, with cause and source line. */
import { useCallback, useMemo } from "preact/hooks";
import type { Communication } from "../../page";
import { facetColor } from "../../parts/colors";
import { FacetLink } from "../../parts/facet_link";
import { Highlight } from "../../parts/highlight";
import { ModuleLink } from "../../parts/module_link";
import { Panel } from "../../parts/panel";
import { SourceLine } from "../../parts/source_line";
import { type Column, Table } from "../../parts/table";
import { formatBytesCell, formatNumber } from "../../parts/units";
import { moduleName } from "../../store/modules";
import { type Facet, formatLocation, selectedCalls } from "../../store/selection";
import { CallDetail } from "./call_detail";
import { selectCall, selectedCall } from "./selected_call";
import { nameAxis } from "./totals";

interface Props {
  readonly communication: Communication;
}

export function CallsTable({ communication }: Props) {
  const { calls, left_out } = communication;
  const columns = useMemo(() => makeColumns(communication), [communication]);
  const matches = selectedCalls.value;
  const isShown = useCallback((row: number) => matches[row] === 1, [matches]);
  const moduleOf = useCallback((row: number) => calls.owner[row]!, [calls]);
  return (
    <Panel
      title="All collectives"
      note={left_out || "Click a value to select it in every view, a row for cause and source."}
    >
      <Table
        label="collectives"
        numRows={calls.rank.length}
        columns={columns}
        isShown={isShown}
        modules={moduleOf}
        active={selectedCall.value.row}
        onActive={(row) => selectCall(row)}
        detail={(row) => <CallDetail row={row} />}
        empty="No collective was recorded."
        height="min(60vh, 48rem)"
      />
    </Panel>
  );
}

function makeColumns(communication: Communication): Column[] {
  const { calls, kinds, phases, causes, dtypes, groups } = communication;
  const bytes = (id: string, title: string, hint: string, column: readonly number[]): Column => ({
    id,
    title,
    hint,
    width: 6.5,
    align: "end",
    value: (row) => column[row]!,
    cell: (row) => formatBytesCell(column[row]!),
  });
  const facet = (name: Facet, column: Column): Column => ({
    ...column,
    cell: (row) => (
      <FacetLink facet={name} value={String(column.value(row))}>
        <Highlight text={String(column.value(row))} />
      </FacetLink>
    ),
  });
  const number = (id: string, title: string, hint: string, column: readonly number[]): Column => ({
    id,
    title,
    hint,
    width: 4.5,
    align: "end",
    isText: true, // sorted from the lowest
    value: (row) => column[row]!,
    cell: (row) => formatNumber(column[row]!),
  });
  const text = (
    id: string,
    title: string,
    width: number,
    read: (row: number) => string,
  ): Column => ({
    id,
    title,
    width,
    isText: true,
    value: read,
  });
  const module = (
    id: string,
    title: string,
    width: number,
    read: (row: number) => number,
  ): Column => ({
    id,
    title,
    width,
    grow: 3,
    isText: true,
    value: (row) => (read(row) < 0 ? "" : moduleName(read(row))),
    cell: (row) =>
      read(row) < 0 ? null : (
        <span class="clip">
          <ModuleLink module={read(row)} />
        </span>
      ),
  });
  const triggerOf = (row: number): number =>
    calls.trigger[row] === calls.owner[row] ? -1 : calls.trigger[row]!;
  const hasTriggers = calls.rank.some((_, row) => triggerOf(row) >= 0);
  return [
    {
      ...text("kind", "Collective", 11, (row) => kinds[calls.kind[row]!]!),
      cell: (row) => (
        <FacetLink facet="kind" value={kinds[calls.kind[row]!]!}>
          <span
            class="swatch"
            style={{ background: facetColor("kind", kinds[calls.kind[row]!]!, calls.kind[row]!) }}
          />
          {kinds[calls.kind[row]!]}
        </FacetLink>
      ),
    },
    facet(
      "axis",
      text("axis", "Axis", 4.5, (row) => nameAxis(communication, calls.axis[row]!)),
    ),
    facet("rank", number("rank", "Rank", "that issued it", calls.rank)),
    number("order", "No.", "in the order in which its rank issued them", calls.order),
    facet(
      "phase",
      text("phase", "Phase", 6.5, (row) => phases[calls.phase[row]!]!),
    ),
    module("owner", "Belongs to", 15, (row) => calls.owner[row]!),
    bytes("wire", "Sent", "bytes that the rank sends (ring estimate)", calls.wire_bytes),
    {
      ...facet(
        "cause",
        text("cause", "Cause", 18, (row) => causes[calls.cause[row]!]!),
      ),
      grow: 3,
    },
    {
      ...text("line", "Line", 13, (row) => formatLocation(calls.source[row]!)),
      grow: 2,
      cell: (row) => <SourceLine source={calls.source[row]!} isShort />,
    },
    bytes("input", "Input", "bytes of the rank's input", calls.input_bytes),
    bytes("output", "Output", "bytes of the rank's output", calls.output_bytes),
    facet(
      "dtype",
      text("dtype", "Dtype", 6, (row) => dtypes[calls.dtype[row]!]!),
    ),
    text("group", "Group", 8.5, (row) => groups[calls.group[row]!]?.name ?? ""),
    ...(hasTriggers ? [module("trigger", "Issued in", 12, triggerOf)] : []),
  ];
}
