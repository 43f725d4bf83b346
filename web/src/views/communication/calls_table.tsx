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
import { parseSort } from "../../parts/table_rows";
import { formatBytesCell, formatNumber } from "../../parts/units";
import { moduleName } from "../../store/modules";
import { param } from "../../store/route";
import { type Facet, formatLocation, selectedCalls } from "../../store/selection";
import { type CallColumn, ServedRows, servedFilters } from "../../store/served_calls";
import { CallDetail } from "./call_detail";
import { shortenCause } from "./cause_rows";
import { selectCall, selectedCall } from "./selected_call";
import { nameAxis } from "./totals";

interface Props {
  readonly communication: Communication;
}

export function CallsTable({ communication }: Props) {
  return communication.num_served ? (
    <ServedCallsTable communication={communication} />
  ) : (
    <PageCallsTable communication={communication} />
  );
}

/** The columns of the table, where a server sorts by them, and the columns of its rows. */
const SERVED_COLUMNS: Readonly<Record<string, CallColumn>> = {
  wire: "wire_bytes",
  input: "input_bytes",
  output: "output_bytes",
  line: "source",
};

function ServedCallsTable({ communication }: Props) {
  const requested = parseSort(param("sort.collectives"));
  const ids = useMemo(() => makeColumns(communication).map(({ id }) => id), [communication]);
  const sort = requested && ids.includes(requested.column) ? requested : null;
  const order = JSON.stringify({
    sort: sort && (SERVED_COLUMNS[sort.column] ?? sort.column),
    is_descending: sort?.isDescending ?? false,
    filters: servedFilters.value,
  });
  const rows = useMemo(() => new ServedRows(JSON.parse(order)), [order]);
  const columns = useMemo(() => makeServedColumns(communication, rows), [communication, rows]);
  const show = useCallback((first: number, end: number) => rows.show(first, end), [rows]);
  rows.numArrived.value; // draws again when rows arrive
  return (
    <Panel
      title="All collectives"
      note={rows.error.value || "Click a value to select it in every view, a row for its details."}
    >
      <Table
        label="collectives"
        numRows={communication.num_served}
        columns={columns}
        served={{ numRows: rows.numRows.value, show }}
        detail={(row) => rows.hasRow(row) && <CallDetail row={row} calls={rows.columns} />}
        empty="No collective was recorded."
        height="min(60vh, 48rem)"
      />
    </Panel>
  );
}

function makeServedColumns(communication: Communication, rows: ServedRows): Column[] {
  const columns = makeColumns({ ...communication, calls: rows.columns }, communication.calls);
  return columns.map(({ cell, value, ...column }) => ({
    ...column,
    value: (row) => (rows.hasRow(row) ? value(row) : null),
    cell: (row) => (rows.hasRow(row) ? (cell?.(row) ?? value(row)) : <span class="dim">…</span>),
  }));
}

function PageCallsTable({ communication }: Props) {
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

/** `example` are calls that tell whether any call was issued in another module than its owner. */
function makeColumns(communication: Communication, example = communication.calls): Column[] {
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
  const hasTriggers = example.trigger.some((trigger, row) => trigger !== example.owner[row]);
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
    ...(communication.num_steps ? [makeStepColumn(communication)] : []),
    module("owner", "Belongs to", 15, (row) => calls.owner[row]!),
    bytes("wire", "Sent", "bytes that the rank sends (ring estimate)", calls.wire_bytes),
    {
      ...text("line", "Line", 13, (row) => formatLocation(calls.source[row]!)),
      texts: [...new Set(communication.traffic.source)].map(formatLocation),
      grow: 2,
      isNeverCut: true,
      cell: (row) => <SourceLine source={calls.source[row]!} isShort />,
    },
    {
      ...facet(
        "cause",
        text("cause", "Cause", 18, (row) => causes[calls.cause[row]!]!),
      ),
      grow: 3,
      isNeverCut: true,
      texts: causes.map(shortenCause),
      cell: (row) => {
        const words = causes[calls.cause[row]!]!;
        return (
          <FacetLink facet="cause" value={words}>
            <Highlight text={shortenCause(words)} />
          </FacetLink>
        );
      },
    },
    bytes("input", "Input", "bytes of the rank's input", calls.input_bytes),
    bytes("output", "Output", "bytes of the rank's output", calls.output_bytes),
    facet(
      "dtype",
      text("dtype", "Dtype", 7, (row) => dtypes[calls.dtype[row]!]!),
    ),
    text("group", "Group", 8.5, (row) => groups[calls.group[row]!]?.name ?? ""),
    ...(hasTriggers ? [module("trigger", "Issued in", 12, triggerOf)] : []),
  ];
}

/** The number of the step, or of the forward pass; empty before the first. */
function makeStepColumn({ calls, step_word }: Communication): Column {
  return {
    id: "step",
    title: step_word === "step" ? "Step" : "Forward",
    hint: step_word === "step" ? "training step" : "number of the forward pass",
    width: 4.5,
    align: "end",
    isText: true, // sorted from the lowest
    value: (row) => calls.step[row] || null,
    cell: (row) =>
      calls.step[row] ? (
        <FacetLink facet="step" value={String(calls.step[row])}>
          {formatNumber(calls.step[row])}
        </FacetLink>
      ) : null,
  };
}
