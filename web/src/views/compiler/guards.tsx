/** The guards of each compilation: what must hold for its graph to be used again. */
import { useMemo } from "preact/hooks";
import type { GuardTable } from "../../page";
import { CopyButton } from "../../parts/copy_button";
import { Panel } from "../../parts/panel";
import { type Column, Table } from "../../parts/table";
import { pluralize } from "../../parts/units";
import { param, setParam } from "../../store/route";

interface Row {
  readonly frame: GuardTable;
  readonly index: number;
}

/** A table for all compilations, or for the one that is chosen. */
export function Guards({ frames }: { frames: readonly GuardTable[] }) {
  const chosen = frames.find(({ compile_id }) => compile_id === param("frame"));
  const rows = useMemo(
    () =>
      (chosen ? [chosen] : frames).flatMap((frame): Row[] =>
        frame.guard.map((_, index) => ({ frame, index })),
      ),
    [frames, chosen],
  );
  const columns = useMemo(() => makeColumns(rows, !chosen && frames.length > 1), [rows, chosen]);
  const leftOut = frames.reduce((sum, frame) => sum + frame.left_out, 0);
  const note = "what must hold for a compiled graph to be used again; a row shows torch's own text";
  return (
    <Panel
      follows={["rank"]}
      title={`Guards (${frames.reduce((sum, { guard }) => sum + guard.length, 0)})`}
      note={`${nameOnly(frames)}${leftOut ? `${note}; ${pluralize(leftOut, "guard")} more are not listed` : note}`}
      controls={
        frames.length > 1 && (
          <select
            class="select"
            aria-label="compilation"
            value={chosen?.compile_id ?? ""}
            onChange={(event) => setParam("frame", event.currentTarget.value || null)}
          >
            <option value="">all compilations</option>
            {frames.map((frame) => (
              <option key={frame.compile_id} value={frame.compile_id}>
                {frame.compile_id} {frame.function} ({frame.guard.length})
              </option>
            ))}
          </select>
        )
      }
    >
      <Table
        label="guards"
        numRows={rows.length}
        columns={columns}
        empty="It has no guards."
        height="26rem"
        detail={(row) => <Guard row={rows[row]!} />}
      />
    </Panel>
  );
}

/** The compilation, if there is only one, which then needs no column. */
function nameOnly([frame, ...more]: readonly GuardTable[]): string {
  return frame && !more.length ? `compilation ${frame.compile_id} of ${frame.function}: ` : "";
}

function Guard({ row: { frame, index } }: { row: Row }) {
  const text = frame.guard[index]!;
  return (
    <div class="guard">
      <p>
        <span class="chip">{frame.kind[index]}</span> <code>{frame.subject[index]}</code>{" "}
        {frame.condition[index]}
      </p>
      <p class="dim">
        compilation {frame.compile_id} of <code>{frame.function}</code>; as torch writes it:
      </p>
      <div class="guard-text">
        <code class="wrap">{text}</code>
        <CopyButton text={text} label="copy the guard" />
      </div>
    </div>
  );
}

function makeColumns(rows: readonly Row[], hasFrame: boolean): Column[] {
  const read = (row: number, name: "kind" | "subject" | "condition"): string =>
    rows[row]!.frame[name][rows[row]!.index]!;
  const frame: Column = {
    id: "frame",
    title: "Compilation",
    width: 11,
    grow: 1,
    isText: true,
    value: (row) => `${rows[row]!.frame.compile_id} ${rows[row]!.frame.function}`,
  };
  return [
    ...(hasFrame ? [frame] : []),
    { id: "kind", title: "Kind", width: 8.5, isText: true, value: (row) => read(row, "kind") },
    {
      id: "subject",
      title: "Of",
      width: 10,
      grow: 2,
      isText: true,
      value: (row) => read(row, "subject"),
      cell: (row) => (
        <code class="clip" title={read(row, "subject")}>
          {read(row, "subject")}
        </code>
      ),
    },
    {
      id: "condition",
      title: "Must hold",
      width: 14,
      grow: 4,
      isText: true,
      value: (row) => read(row, "condition"),
    },
  ];
}
