/** The figures of a view, compared with those of another recording: before, after, and the change. */
import { useMemo } from "preact/hooks";
import type { Figure } from "../page";
import {
  type Difference,
  earlier,
  forgetDropped,
  formatChangeShare,
  isDropped,
  listDifferences,
} from "../store/earlier";
import { page } from "../store/page";
import { param, setParam } from "../store/route";
import { Choices } from "./choices";
import { Empty } from "./empty_message";
import { Panel } from "./panel";
import { type Column, Table } from "./table";
import { formatBytes, formatBytesChange, formatNumber, pluralize } from "./units";

/** Nothing if the page is of one recording. */
export function Differences({ view, title }: { view: string; title: string }) {
  const compared = earlier.value;
  if (!compared) return null;
  return <DifferencePanel key={view} {...{ view, title }} before={compared.figures} />;
}

interface Props {
  readonly view: string;
  readonly title: string;
  readonly before: readonly Figure[];
}

function DifferencePanel({ view, title, before }: Props) {
  const { figures } = page.value;
  const rows = useMemo(() => listDifferences(view, before, figures), [view, before, figures]);
  const changed = rows.filter((row) => row.before !== row.after);
  const isAll = param("differences") === "all";
  const shown = isAll ? rows : changed;
  const columns = useMemo(() => makeColumns(shown), [rows, isAll]);
  const { name, note } = earlier.value!;
  const hasBefore = rows.some((row) => row.before !== null);
  const elsewhere = view === "overview" ? countOfOtherViews(view, before, figures) : 0;
  if (!rows.length) return null;
  return (
    <Panel
      title={`${title}: compared with ${name}`}
      note={
        hasBefore
          ? `${changed.length ? formatNumber(changed.length) : "None"} of ${pluralize(rows.length, "figure")} differ. ${elsewhere ? `In other views, ${formatNumber(elsewhere)} differ: see Compare. ` : ""}${note}`
          : note
      }
      controls={
        <>
          {isDropped.value && (
            <button type="button" class="small-button" onClick={forgetDropped}>
              End comparison
            </button>
          )}
          {hasBefore && (
            <Choices
              label="which figures"
              choices={[
                { id: "changed", title: "Differing" },
                { id: "all", title: "All" },
              ]}
              value={isAll ? "all" : "changed"}
              onChange={(id) => setParam("differences", id === "all" ? "all" : null)}
            />
          )}
        </>
      }
    >
      {!hasBefore && <Empty>{`${name} has no figures of this view.`}</Empty>}
      {hasBefore && shown.length > 0 && (
        <Table
          label={`differences of ${view}`}
          numRows={shown.length}
          columns={columns}
          empty="Nothing differs."
          height="18rem"
        />
      )}
    </Panel>
  );
}

/** Differing figures of all other views: on the overview, "none differ" must not hide them. */
function countOfOtherViews(
  view: string,
  before: readonly Figure[],
  after: readonly Figure[],
): number {
  const others = new Set([...before, ...after].map((figure) => figure.view));
  others.delete(view);
  const rows = [...others].flatMap((name) => listDifferences(name, before, after));
  return rows.filter((row) => row.before !== row.after).length;
}

function format(value: number | null, unit: string): string {
  if (value === null) return "none";
  return unit === "bytes" ? formatBytes(value) : formatNumber(value);
}

function formatChange({ before, after, unit }: Difference): string {
  const change = (after ?? 0) - (before ?? 0);
  if (unit === "bytes") return formatBytesChange(change);
  if (!change) return "·";
  return `${change > 0 ? "+" : "−"}${formatNumber(Math.abs(change))}`;
}

function makeColumns(rows: readonly Difference[]): Column[] {
  const at = (row: number): Difference => rows[row]!;
  return [
    { id: "label", title: "Of", width: 9.5, grow: 3, isText: true, value: (row) => at(row).label },
    {
      id: "change",
      title: "Difference",
      width: 7,
      align: "end",
      value: (row) => (at(row).after ?? 0) - (at(row).before ?? 0),
      cell: (row) => formatChange(at(row)),
    },
    {
      id: "percent",
      title: "%",
      width: 5.5,
      align: "end",
      value: (row) => changeShare(at(row)),
      cell: (row) => formatChangeShare(at(row)),
    },
    {
      id: "group",
      title: "Figure",
      width: 9,
      grow: 2,
      isText: true,
      value: (row) => at(row).group,
    },
    {
      id: "before",
      title: "Before",
      width: 6,
      align: "end",
      value: (row) => at(row).before,
      cell: (row) => format(at(row).before, at(row).unit),
    },
    {
      id: "after",
      title: "After",
      width: 6,
      align: "end",
      value: (row) => at(row).after,
      cell: (row) => format(at(row).after, at(row).unit),
    },
  ];
}

function changeShare({ before, after }: Difference): number | null {
  return before && after !== null ? (after - before) / before : null;
}
