/** What is in use at an instant, or what changed between two: by kind, and by module, line or phase. */
import { useMemo } from "preact/hooks";
import type { Allocations, MemoryCurve } from "../../page";
import { Bar } from "../../parts/bar";
import { Choices } from "../../parts/choices";
import { seriesColor } from "../../parts/colors";
import { Panel } from "../../parts/panel";
import { Table } from "../../parts/table";
import { formatBytes, formatBytesChange, formatShare } from "../../parts/units";
import { hasModuleSelection, representatives, selectedName } from "../../store/modules";
import { param, route, setParam } from "../../store/route";
import { type Group, type Instants, sumGroups } from "./allocations";
import { makeColumns } from "./group_columns";
import { describeMoment, nameInstant, peakOrder, setInstants } from "./instants";
import { listCurveFacets, makeAllocationFilter } from "./selected_curve";

export type Grouping = "module" | "layer" | "line" | "phase" | "allocation";

export const GROUPINGS: readonly { id: Grouping; title: string; hint: string }[] = [
  { id: "module", title: "Module", hint: "modules that own the memory" },
  { id: "layer", title: "Layers folded", hint: "identical layers together" },
  { id: "line", title: "Line", hint: "source lines that allocated it" },
  { id: "phase", title: "Phase", hint: "phases in which it was allocated" },
  { id: "allocation", title: "Allocation", hint: "each allocation" },
];

interface Props {
  readonly curve: MemoryCurve;
  readonly table: Allocations;
  readonly instants: Instants;
}

export function InUse({ curve, table, instants }: Props) {
  const grouping = GROUPINGS.find(({ id }) => id === param("by"))?.id ?? "module";
  const category = curve.kinds.indexOf(param("category") ?? "");
  const { params } = route.value;
  const selection = [params.m, params.line, params.phase].join("\n");
  const { at, from } = instants;
  const kinds = useMemo(
    () => sumGroups(table, { at, from }, (row) => table.kind[row]!, makeAllocationFilter(table)),
    [table, at, from, selection],
  );
  const groups = useMemo(() => {
    const isSelected = makeAllocationFilter(table);
    const isShown = (row: number): boolean =>
      isSelected(row) && (category < 0 || table.kind[row] === category);
    return sumGroups(table, { at, from }, makeKey(table, grouping), isShown);
  }, [table, at, from, grouping, category, selection]);
  return (
    <Panel
      title={describeTitle(curve, instants)}
      note={describeSum(curve, table, instants, kinds)}
      follows={listCurveFacets(curve)}
      controls={<Controls curve={curve} instants={instants} grouping={grouping} />}
    >
      <div class="in-use">
        <Kinds curve={curve} kinds={kinds} isChange={from !== null} category={category} />
        <Groups key={grouping} {...{ curve, table, instants, groups, grouping }} />
      </div>
    </Panel>
  );
}

function makeKey(table: Allocations, grouping: Grouping): (row: number) => number {
  const firsts = representatives.value;
  const keys: Readonly<Record<Grouping, (row: number) => number>> = {
    module: (row) => table.module[row]!,
    layer: (row) => firsts[table.module[row]!] ?? -1,
    line: (row) => table.line[row]!,
    phase: (row) => table.phase[row]!,
    allocation: (row) => row,
  };
  return keys[grouping];
}

function describeTitle(curve: MemoryCurve, { at, from }: Instants): string {
  return from === null
    ? `In use at ${nameInstant(curve, at)}`
    : `Change from ${nameInstant(curve, from)} to ${nameInstant(curve, at)}`;
}

function describeSum(
  curve: MemoryCurve,
  table: Allocations,
  { at, from }: Instants,
  kinds: readonly Group[],
): string {
  const sum = (read: (group: Group) => number): number =>
    kinds.reduce((total, group) => total + read(group), 0);
  const inUse = sum((group) => group.numBytes);
  const owner = hasModuleSelection.value ? ` of ${selectedName.value}` : "";
  const note = table.note ? ` ${table.note}.` : "";
  if (from === null) {
    return `${formatBytes(inUse)}${owner}, ${describeMoment(curve, at)}.${note}`;
  }
  const before = sum((group) => group.beforeBytes);
  const allocated = formatBytes(sum((group) => group.allocatedBytes));
  const freed = formatBytes(sum((group) => group.freedBytes));
  return (
    `${formatBytes(before)} → ${formatBytes(inUse)}${owner} (${formatBytesChange(inUse - before)}): ` +
    `${allocated} allocated, ${freed} freed.${note}`
  );
}

function Controls({
  curve,
  instants: { at, from },
  grouping,
}: {
  curve: MemoryCurve;
  instants: Instants;
  grouping: Grouping;
}) {
  return (
    <>
      {from !== null && (
        <button type="button" class="small-button" onClick={() => setInstants(at)}>
          End comparison
        </button>
      )}
      {from === null && at !== peakOrder(curve) && (
        <>
          <button
            type="button"
            class="small-button"
            onClick={() => setInstants(at, peakOrder(curve))}
          >
            Compare with the peak
          </button>
          <button type="button" class="small-button" onClick={() => setInstants(null)}>
            Show the peak
          </button>
        </>
      )}
      <Choices
        label="group by"
        choices={GROUPINGS}
        value={grouping}
        onChange={(id) => setParam("by", id === "module" ? null : id)}
      />
    </>
  );
}

interface KindsProps {
  readonly curve: MemoryCurve;
  readonly kinds: readonly Group[];
  readonly isChange: boolean;
  readonly category: number;
}

/** Sums by kind; clicking one shows only its allocations. */
function Kinds({ curve, kinds, isChange, category }: KindsProps) {
  const size = (group: Group): number =>
    isChange ? group.numBytes - group.beforeBytes : group.numBytes;
  const max = Math.max(0, ...kinds.map((group) => Math.abs(size(group))));
  const total = kinds.reduce((sum, group) => sum + group.numBytes, 0);
  return (
    <ul class="memory-kinds" aria-label="by category">
      {kinds.map((group) => (
        <li key={group.key}>
          <button
            type="button"
            aria-pressed={group.key === category}
            title={`show only ${curve.kinds[group.key]}`}
            onClick={() =>
              setParam("category", group.key === category ? null : curve.kinds[group.key]!)
            }
          >
            <span class="swatch" style={{ background: seriesColor(group.key) }} />
            <span class="memory-kind">{curve.kinds[group.key]}</span>
          </button>
          <Bar
            value={Math.abs(size(group))}
            max={max}
            text={isChange ? formatBytesChange(size(group)) : formatBytes(size(group))}
            color={seriesColor(group.key)}
          />
          <span class="memory-share">{isChange ? "" : formatShare(group.numBytes, total)}</span>
        </li>
      ))}
    </ul>
  );
}

interface GroupsProps extends Props {
  readonly groups: readonly Group[];
  readonly grouping: Grouping;
}

function Groups({ curve, table, instants, groups, grouping }: GroupsProps) {
  const isChange = instants.from !== null;
  const columns = useMemo(
    () => makeColumns(curve, table, groups, { grouping, isChange }),
    [curve, table, groups, grouping, isChange],
  );
  return (
    <Table
      label="allocations in use"
      numRows={groups.length}
      columns={columns}
      empty={isChange ? "Nothing changed between the two." : "Nothing is in use here."}
      height="30rem"
    />
  );
}
