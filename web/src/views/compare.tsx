/** Two recordings side by side: what was added, what is gone, what changed. */
import "./compare.css";
import { useCallback, useMemo } from "preact/hooks";
import type { ChangeRow, Comparison } from "../page";
import { Badge } from "../parts/badge";
import { Choices } from "../parts/choices";
import { CollectiveName } from "../parts/collective_name";
import { Command } from "../parts/command";
import { Differences } from "../parts/differences";
import { FacetLink } from "../parts/facet_link";
import { ModuleLink } from "../parts/module_link";
import { Panel } from "../parts/panel";
import { SourceLine } from "../parts/source_line";
import { type Column, Table } from "../parts/table";
import { joinNames } from "../parts/unfollowed";
import { pluralize } from "../parts/units";
import { earlier, isDropped } from "../store/earlier";
import { isFoldedRowInSelection } from "../store/modules";
import { page } from "../store/page";
import { param, route, setParam } from "../store/route";
import { VIEWS } from ".";
import { Areas } from "./compare/areas";
import { describeHidden, FOLLOWED, isChangeSelected } from "./compare/selected_changes";
import type { View } from "./view";

const ALL = "all";

function Compare() {
  const { comparison } = page.value;
  if (!comparison || isDropped.value) return <AllDifferences />;
  return (
    <>
      <Panel title="What changed" note={describe(comparison)}>
        <Areas comparison={comparison} />
        {comparison.notes.map((note) => (
          <p key={note} class="compare-note">
            {note}
          </p>
        ))}
      </Panel>
      {comparison.changes.length > 0 && <Changes comparison={comparison} />}
    </>
  );
}

/** The figures of all views, compared with a file that was dropped onto the page. */
function AllDifferences() {
  const { name, omitted, command } = earlier.value!;
  const compared = [...page.value.figures, ...earlier.value!.figures].map(({ view }) => view);
  const shown = new Set([...compared, ...Object.keys(omitted), "communication", "memory"]);
  return (
    <>
      {command && (
        <Panel
          title={`Compared with ${name} in the browser`}
          note={`Not compared: ${joinNames([...Object.values(omitted), "single changes"])}. This command writes a page that compares everything:`}
        >
          <div class="compare-command">
            <Command text={command} />
          </div>
        </Panel>
      )}
      {VIEWS.filter(({ id }) => shown.has(id)).map(({ id, title }) => (
        <Differences key={id} view={id} title={title} />
      ))}
    </>
  );
}

function describe({ before, after, changes }: Comparison): string {
  const names = `from ${before} to ${after}`;
  return changes.length ? names : `${names}: nothing.`;
}

const STATUSES = [
  { id: ALL, title: "All" },
  { id: "worse", title: "Worse" },
  { id: "added", title: "Added" },
  { id: "gone", title: "Gone" },
  { id: "changed", title: "Changed" },
];

function isOfStatus(change: ChangeRow, status: string): boolean {
  if (status === ALL) return true;
  return status === "worse" ? change.is_worse === true : change.status === status;
}

function Changes({ comparison }: { comparison: Comparison }) {
  const { changes, areas } = comparison;
  const columns = useMemo(() => makeColumns(comparison), [comparison]);
  const area = areas.findIndex(({ name }) => name === param("area"));
  const status = param("status") ?? ALL;
  const { params } = route.value;
  const isShown = useCallback(
    (row: number) => {
      const change = changes[row]!;
      return (
        (area < 0 || change.area === area) && isOfStatus(change, status) && isChangeSelected(change)
      );
    },
    [changes, area, status, params],
  );
  const moduleOf = useCallback((row: number) => changes[row]!.module, [changes]);
  const leftOut = comparison.left_out
    ? ` ${pluralize(comparison.left_out, "change")} more are not listed.`
    : "";
  return (
    <Panel
      title="Changes"
      note={`Layers with the same change share a row.${leftOut}${describeHidden(changes)}`}
      follows={FOLLOWED}
      controls={
        <Choices
          label="which changes"
          choices={STATUSES}
          value={status}
          onChange={(id) => setParam("status", id === ALL ? null : id)}
        />
      }
    >
      <Table
        label="changes"
        numRows={changes.length}
        columns={columns}
        isShown={isShown}
        modules={moduleOf}
        isSelected={isFoldedRowInSelection}
        empty="Nothing changed."
        height="min(75vh, 70rem)"
        detail={(row) => <Change change={changes[row]!} area={areas[changes[row]!.area]!.name} />}
      />
    </Panel>
  );
}

function toneOf(change: ChangeRow): string {
  if (change.is_worse === null) return "";
  return change.is_worse ? "worse" : "better";
}

/** Of a finding only its severity: the row's details have its sentence. */
function summarize(text: string, isFinding: boolean): string {
  return isFinding ? text.split(":", 1)[0]! : text;
}

function makeColumns({ changes, areas }: Comparison): Column[] {
  const changeAt = (row: number): ChangeRow => changes[row]!;
  const isFinding = (row: number): boolean => areas[changeAt(row).area]!.name === "findings";
  return [
    {
      id: "status",
      title: "",
      narrowPlace: 3,
      width: 7.5,
      value: (row) => changeAt(row).status,
      cell: (row) => <Badge word={changeAt(row).status} />,
    },
    {
      id: "module",
      title: "Module",
      width: 11,
      grow: 3,
      value: (row) => changeAt(row).path,
      cell: (row) => (
        <span class="clip-pair">
          <span class="clip">
            <ModuleLink module={changeAt(row).module} text={changeAt(row).path || "all modules"} />
          </span>
          {changeAt(row).repeat > 1 && <span class="chip">×{changeAt(row).repeat}</span>}
        </span>
      ),
    },
    { id: "area", title: "Area", width: 7.5, value: (row) => areas[changeAt(row).area]!.name },
    {
      id: "what",
      title: "What",
      narrowPlace: 0,
      width: 12,
      grow: 3,
      value: (row) => changeAt(row).what,
    },
    {
      id: "before",
      title: "Before",
      width: 6.5,
      grow: 2,
      align: "end",
      value: (row) => changeAt(row).before,
      cell: (row) => <span class="clip">{summarize(changeAt(row).before, isFinding(row))}</span>,
    },
    {
      id: "after",
      title: "After",
      hint: "sorted by how much it changed",
      width: 6.5,
      grow: 2,
      align: "end",
      value: (row) => changeAt(row).delta,
      exported: (row) => changeAt(row).after,
      cell: (row) => (
        <span class={`clip ${toneOf(changeAt(row))}`}>
          {summarize(changeAt(row).after, isFinding(row)) || "none"}
        </span>
      ),
    },
  ];
}

function Change({ change, area }: { change: ChangeRow; area: string }) {
  return (
    <dl class="detail-list">
      <div>
        <dt>{area}</dt>
        <dd class="wrap">
          {change.what} <Badge word={change.status} />
        </dd>
      </div>
      <div>
        <dt>module</dt>
        <dd>
          <ModuleLink module={change.module} text={change.path || "all modules"} />
          {change.repeat > 1 && <span class="dim"> and {change.repeat - 1} like it</span>}
        </dd>
      </div>
      {change.kind && (
        <div>
          <dt>collectives</dt>
          <dd>
            <CollectiveName kind={change.kind} axis={change.axis} />
            {change.phase && (
              <>
                {" in "}
                <FacetLink facet="phase" value={change.phase} isInline>
                  {change.phase}
                </FacetLink>
              </>
            )}
          </dd>
        </div>
      )}
      {change.source >= 0 && (
        <div>
          <dt>line</dt>
          <dd>
            <SourceLine source={change.source} isShort />
          </dd>
        </div>
      )}
      <div>
        <dt>before</dt>
        <dd class="wrap">{change.before || "none"}</dd>
      </div>
      <div>
        <dt>after</dt>
        <dd class={`wrap ${toneOf(change)}`}>{change.after || "none"}</dd>
      </div>
      {change.because && (
        <div>
          <dt>because</dt>
          <dd class="wrap">{change.because}</dd>
        </div>
      )}
    </dl>
  );
}

export const view: View = {
  id: "compare",
  title: "Compare",
  hasData: (page) => page.comparison !== null || isDropped.value,
  empty:
    "This page is of one recording. Drop a second report or recording onto it, or create a page of two.",
  command: "shardscope report after.json --against before.json -o report.html",
  params: ({ comparison }) => ({
    area: (comparison?.areas ?? []).map(({ name }) => name),
    status: STATUSES.map(({ id }) => id),
  }),
  Component: Compare,
};
