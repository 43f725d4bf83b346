/** Each parameter's placement, drawn over its mesh, and the audit of all of them. */
import "./sharding.css";
import { useCallback, useMemo, useState } from "preact/hooks";
import type { Parameters, ShardingTable } from "../page";
import { Choices } from "../parts/choices";
import { Empty } from "../parts/empty_message";
import { ModuleLink } from "../parts/module_link";
import { Panel } from "../parts/panel";
import { Table } from "../parts/table";
import { formatNumber } from "../parts/units";
import { page } from "../store/page";
import { param, route, setParam } from "../store/route";
import { Flags, makeColumns } from "./sharding/columns";
import { LayoutDrawing } from "./sharding/layout_drawing";
import { chooseRowToDraw, listUsefulFilters } from "./sharding/parameter_filters";
import { axisOf, listFollowed, makeParameterFilter } from "./sharding/selected_parameters";
import { Summary } from "./sharding/summary";
import type { View } from "./view";

const MAX_LAYOUTS = 48;

function Sharding() {
  const table = page.value.sharding!;
  const hasParameters = table.parameters.name.length > 0;
  return (
    <>
      {table.layouts.length > 0 && <Layouts table={table} />}
      {hasParameters && <Audit table={table} />}
    </>
  );
}

function Layouts({ table }: { table: ShardingTable }) {
  const shown = table.layouts.slice(0, MAX_LAYOUTS);
  const more = table.layouts.length - shown.length;
  const note = more ? `${formatNumber(more)} more are not drawn.` : "Recorded one by one.";
  return (
    <Panel title="Layouts" note={note} follows={[]}>
      <ul class="layouts">
        {shown.map(({ name, drawing }, i) => (
          <li key={i}>
            <h3 class="mono">{name}</h3>
            <LayoutDrawing drawing={table.drawings[drawing]!} />
          </li>
        ))}
      </ul>
    </Panel>
  );
}

function Audit({ table }: { table: ShardingTable }) {
  const { parameters } = table;
  const [selectedRow, selectRow] = useState(-1);
  const filters = useMemo(() => listUsefulFilters(parameters), [parameters]);
  const filter = filters.find(({ id }) => id === param("show")) ?? filters[0]!;
  const columns = useMemo(() => makeColumns(parameters), [parameters]);
  const axis = axisOf(parameters);
  const { params } = route.value;
  const isShown = useMemo(() => {
    const isSelected = makeParameterFilter(parameters);
    return (row: number) => filter.matches(parameters, row) && isSelected(row);
  }, [parameters, filter, params]);
  const moduleOf = useCallback((row: number) => parameters.module[row]!, [parameters]);
  const drawnRow = chooseRowToDraw(
    parameters.name.length,
    selectedRow,
    isShown,
    (row) => (table.drawings[parameters.drawing[row]!]?.shards.length ?? 0) > 1,
  );
  return (
    <>
      <div class="sharding-top">
        <Summary table={table} />
        <SelectedLayout table={table} row={drawnRow} />
      </div>
      <Panel
        title="Parameters"
        note={`Click a parameter to draw its layout.${axis === null ? "" : ` Those that are divided along ${axis}.`}`}
        follows={listFollowed(parameters)}
        controls={
          filters.length > 1 && (
            <Choices
              label="which parameters"
              choices={filters}
              value={filter.id}
              onChange={(id) => setParam("show", id === "all" ? null : id)}
            />
          )
        }
      >
        <Table
          label="parameters"
          numRows={parameters.name.length}
          columns={columns}
          isShown={isShown}
          modules={moduleOf}
          onActive={selectRow}
          detail={(row) => <ParameterDetail parameters={parameters} row={row} />}
          empty="No parameter was recorded."
          height="min(70vh, 60rem)"
        />
      </Panel>
    </>
  );
}

function SelectedLayout({ table, row }: { table: ShardingTable; row: number }) {
  const { parameters, drawings } = table;
  if (row < 0) return <Empty>No parameter matches the filter.</Empty>;
  const drawing = drawings[parameters.drawing[row]!];
  return (
    <Panel title="Layout" note={<span class="drawn-name mono">{parameters.name[row]}</span>}>
      {drawing ? (
        <LayoutDrawing drawing={drawing} />
      ) : (
        <div class="layout">
          <p class="layout-description">{parameters.placement[row]}</p>
          <p class="dim">
            {parameters.shape[row]}, of which a rank holds {parameters.local_shape[row]}.
          </p>
        </div>
      )}
    </Panel>
  );
}

function ParameterDetail({ parameters, row }: { parameters: Parameters; row: number }) {
  const facts: readonly [string, string][] = [
    ["placement", parameters.placement[row]!],
    ["live name", parameters.live_name[row]!],
    ["checkpoint key", parameters.checkpoint_key[row]!],
    ["rule", parameters.rule[row]!],
    ["FSDP group", parameters.fsdp_group[row]!],
    ["tied as", parameters.alias_group[row]!],
    ["recorded on", `ranks ${parameters.ranks[row]}`],
    ["is", describeKind(parameters, row)],
  ];
  return (
    <div class="op-detail">
      <p class="cause-head">
        <b class="mono wrap">{parameters.name[row]}</b>
        <Flags flags={parameters.flags[row]!} />
      </p>
      <dl class="detail-list">
        <div>
          <dt>module</dt>
          <dd>
            <ModuleLink module={parameters.module[row]!} />
          </dd>
        </div>
        {facts.map(
          ([label, text]) =>
            text && (
              <div key={label}>
                <dt>{label}</dt>
                <dd class="wrap mono">{text}</dd>
              </div>
            ),
        )}
      </dl>
    </div>
  );
}

function describeKind({ is_buffer, is_trainable }: Parameters, row: number): string {
  if (is_buffer[row]) return "a buffer";
  return is_trainable[row] ? "a parameter" : "a parameter without gradients";
}

export const view: View = {
  id: "sharding",
  title: "Sharding",
  hasData: (page) => page.sharding !== null,
  empty: "Parameters were not recorded.",
  command: "shardscope audit TARGET -o recording.json",
  params: ({ sharding }) => ({
    show: sharding ? listUsefulFilters(sharding.parameters).map(({ id }) => id) : [],
  }),
  Component: Sharding,
};
