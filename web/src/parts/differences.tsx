/** The figures of a view, compared with those of another recording: before, after, and the change. */
import { useMemo } from "preact/hooks";
import { listComparedFigures } from "../store/compared_figures";
import { type Difference, formatChangeShare, isSame, listDifferences } from "../store/differences";
import { type Earlier, earlier } from "../store/earlier";
import { page } from "../store/page";
import { param, route, setParam } from "../store/route";
import { selectedFacets } from "../store/selection";
import { Choices } from "./choices";
import { Empty } from "./empty_message";
import { Panel } from "./panel";
import { type Column, Table } from "./table";
import { formatBytes, formatBytesChange, formatNumber, pluralize } from "./units";

/** Nothing if the page is of one recording. */
export function Differences({ view, title }: { view: string; title: string }) {
  if (!earlier.value) return null;
  return <DifferencePanel key={view} view={view} title={title} />;
}

interface Props {
  readonly view: string;
  readonly title: string;
}

function DifferencePanel({ view, title }: Props) {
  const compared = earlier.value!;
  const { params } = route.value;
  const { before, after, follows, numHidden } = useMemo(
    () => listComparedFigures(view),
    [view, compared, params],
  );
  const rows = useMemo(() => listDifferences(before, after), [before, after]);
  const changed = rows.filter((row) => !isSame(row));
  const isAll = param("differences") === "all";
  const shown = isAll ? rows : changed;
  const columns = useMemo(() => makeColumns(shown), [rows, isAll]);
  if (!rows.length && !compared.omitted[view]) return null;
  const isPart = selectedFacets.value.some((facet) => follows.includes(facet));
  const facts = [
    before.length > 0 &&
      `${changed.length ? formatNumber(changed.length) : "None"} of ${pluralize(rows.length, "figure")} differ${isPart ? " in what is selected" : ""}.`,
    numHidden > 0 && `Not shown: ${pluralize(numHidden, "figure")} of the whole run.`,
    view === "overview" && describeOtherViews(),
    describeOmitted(compared, view),
  ];
  return (
    <Panel
      title={`${title}: compared with ${compared.name}`}
      note={facts.filter(Boolean).join(" ")}
      follows={follows}
      controls={
        before.length > 0 && (
          <Choices
            label="which figures"
            choices={[
              { id: "changed", title: "Differing" },
              { id: "all", title: "All" },
            ]}
            value={isAll ? "all" : "changed"}
            onChange={(id) => setParam("differences", id === "all" ? "all" : null)}
          />
        )
      }
    >
      {!before.length && !compared.omitted[view] && (
        <Empty>{`${compared.name} has no figures of this view.`}</Empty>
      )}
      {before.length > 0 && shown.length > 0 && (
        <Table
          label={`differences of ${view}`}
          numRows={shown.length}
          columns={columns}
          empty="Nothing differs."
          maxLines={2}
          height="18rem"
        />
      )}
    </Panel>
  );
}

/** What of a view is not compared, and the command that compares it. */
export function describeOmitted({ omitted, command }: Earlier, view: string): string {
  return omitted[view]
    ? `Not compared in the browser: ${omitted[view]}. For these: ${command}`
    : "";
}

/** Differing figures of all other views: on the overview, "none differ" must not hide them. */
function describeOtherViews(): string {
  const views = new Set([...page.value.figures, ...earlier.value!.figures].map(({ view }) => view));
  views.delete("overview");
  const rows = [...views].flatMap((view) => {
    const { before, after } = listComparedFigures(view);
    return before.length ? listDifferences(before, after) : [];
  });
  const number = rows.filter((row) => !isSame(row)).length;
  return number ? `In other views, ${formatNumber(number)} differ: see Compare.` : "";
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
