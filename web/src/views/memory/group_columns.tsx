/** Columns of the table of what is in use: what a group is, and its bytes. */
import type { Allocations, MemoryCurve } from "../../page";
import { seriesColor } from "../../parts/colors";
import { ModuleLink } from "../../parts/module_link";
import { SourceLine } from "../../parts/source_line";
import type { Column } from "../../parts/table";
import {
  formatBytes,
  formatBytesCell,
  formatBytesChange,
  formatCount,
  formatNumber,
  formatShare,
} from "../../parts/units";
import { moduleName, representatives } from "../../store/modules";
import { page } from "../../store/page";
import { formatLocation } from "../../store/selection";
import type { Group } from "./allocations";
import type { Grouping } from "./in_use";

const NO_MODULE = "no module";
const NO_LINE = "no line of the program";

interface Options {
  readonly grouping: Grouping;
  readonly isChange: boolean;
}

export function makeColumns(
  curve: MemoryCurve,
  table: Allocations,
  groups: readonly Group[],
  { grouping, isChange }: Options,
): Column[] {
  return [
    ...makeLabels(curve, table, groups, grouping),
    ...(isChange ? makeChanges(groups) : makeSizes(groups, grouping)),
  ];
}

function makeLabels(
  curve: MemoryCurve,
  table: Allocations,
  groups: readonly Group[],
  grouping: Grouping,
): Column[] {
  const rowOf = (row: number): number => groups[row]!.row;
  const module = moduleColumn((row) => table.module[rowOf(row)]!);
  switch (grouping) {
    case "module":
      return [module];
    case "layer":
      return [layerColumn((row) => groups[row]!.key)];
    case "line":
      return [lineColumn((row) => groups[row]!.key, true)];
    case "phase":
      return [
        {
          id: "phase",
          title: "Allocated in",
          width: 9,
          grow: 2,
          isText: true,
          value: (row) => table.phases[groups[row]!.key]!,
        },
      ];
    case "allocation":
      return [
        module,
        kindColumn(curve, (row) => table.kind[rowOf(row)]!),
        lineColumn((row) => table.line[rowOf(row)]!, false),
        {
          id: "phase",
          title: "Allocated in",
          width: 8,
          isText: true,
          value: (row) => table.phases[table.phase[rowOf(row)]!]!,
        },
        {
          id: "life",
          title: "Events",
          hint: "from the event that allocated it to the one that freed it",
          width: 9,
          value: (row) => table.start[rowOf(row)]!,
          cell: (row) => <span class="clip">{describeLife(table, rowOf(row))}</span>,
        },
      ];
  }
}

function moduleColumn(moduleOf: (row: number) => number): Column {
  return {
    id: "module",
    title: "Module",
    width: 10,
    grow: 3,
    isText: true,
    value: (row) => (moduleOf(row) < 0 ? NO_MODULE : moduleName(moduleOf(row))),
    cell: (row) => <ModuleLink module={moduleOf(row)} text={nameOf(moduleOf(row))} />,
  };
}

function nameOf(module: number): string | undefined {
  return module < 0 ? NO_MODULE : undefined;
}

/** Modules that are identical except for their numbers; the first stands for all. */
function layerColumn(moduleOf: (row: number) => number): Column {
  const counts = new Map<number, number>();
  for (const first of representatives.value) counts.set(first, (counts.get(first) ?? 0) + 1);
  const plain = moduleColumn(moduleOf);
  return {
    ...plain,
    title: "Modules",
    hint: "identical layers together, by the name of the first",
    cell: (row) => {
      const count = counts.get(moduleOf(row)) ?? 1;
      return (
        <span class="clip-pair">
          <span class="clip">
            <ModuleLink module={moduleOf(row)} text={nameOf(moduleOf(row))} />
          </span>
          {count > 1 && <span class="chip">×{count}</span>}
        </span>
      );
    },
  };
}

function kindColumn(curve: MemoryCurve, kindOf: (row: number) => number): Column {
  return {
    id: "kind",
    title: "Category",
    width: 10.5,
    isText: true,
    value: (row) => curve.kinds[kindOf(row)]!,
    cell: (row) => (
      <span class="clip">
        <span class="swatch" style={{ background: seriesColor(kindOf(row)) }} />
        {curve.kinds[kindOf(row)]}
      </span>
    ),
  };
}

function lineColumn(lineOf: (row: number) => number, hasText: boolean): Column {
  return {
    id: "line",
    title: "Line",
    width: hasText ? 14 : 9,
    grow: hasText ? 5 : 2,
    isText: true,
    value: (row) => formatLocation(lineOf(row)) || NO_LINE,
    cell: (row) =>
      lineOf(row) < 0 ? (
        <span class="dim">{NO_LINE}</span>
      ) : (
        <span class="line-cell">
          <SourceLine source={lineOf(row)} isShort />
          {hasText && (
            <code class="line-text" title={page.value.sources.text[lineOf(row)]}>
              {page.value.sources.text[lineOf(row)]}
            </code>
          )}
        </span>
      ),
  };
}

function describeLife(table: Allocations, row: number): string {
  const start = table.start[row]!;
  const end = table.end[row]!;
  const from = start <= table.first ? "before" : formatNumber(start);
  return `${from} – ${end > table.last ? "after" : formatNumber(end)}`;
}

function makeSizes(groups: readonly Group[], grouping: Grouping): Column[] {
  const max = Math.max(0, ...groups.map((group) => group.numBytes));
  const total = groups.reduce((sum, group) => sum + group.numBytes, 0);
  const sizes: Column[] = [
    {
      id: "bytes",
      title: "Bytes",
      width: 9,
      grow: 2,
      align: "end",
      value: (row) => groups[row]!.numBytes,
      cell: (row) => <KindBar group={groups[row]!} max={max} />,
    },
    {
      id: "share",
      title: "Share",
      width: 5,
      align: "end",
      value: (row) => groups[row]!.numBytes / (total || 1),
      cell: (row) => formatShare(groups[row]!.numBytes, total),
    },
  ];
  if (grouping === "allocation") return sizes;
  return [
    ...sizes,
    {
      id: "count",
      title: "Count",
      hint: "allocations in use",
      width: 5.5,
      align: "end",
      value: (row) => groups[row]!.count,
      cell: (row) => formatCount(groups[row]!.count),
    },
  ];
}

/** Bytes with a bar in the colours of the kinds. */
function KindBar({ group, max }: { group: Group; max: number }) {
  return (
    <span class="bar">
      <span class="bar-track kind-bar">
        {group.bytesByKind.map(
          (numBytes, kind) =>
            numBytes > 0 && (
              <span
                key={kind}
                style={{
                  width: `${(100 * numBytes) / (max || 1)}%`,
                  background: seriesColor(kind),
                }}
              />
            ),
        )}
      </span>
      <span class="bar-text">{formatBytes(group.numBytes)}</span>
    </span>
  );
}

function makeChanges(groups: readonly Group[]): Column[] {
  const column = (
    id: string,
    title: string,
    hint: string,
    value: (group: Group) => number,
  ): Column => ({
    id,
    title,
    hint,
    width: 6.5,
    align: "end",
    value: (row) => value(groups[row]!),
    cell: (row) => formatBytesCell(value(groups[row]!)),
  });
  return [
    {
      id: "change",
      title: "Change",
      width: 6.5,
      align: "end",
      value: (row) => groups[row]!.numBytes - groups[row]!.beforeBytes,
      cell: (row) => formatBytesChange(groups[row]!.numBytes - groups[row]!.beforeBytes),
    },
    column("allocated", "Allocated", "between the two", (group) => group.allocatedBytes),
    column("freed", "Freed", "between the two", (group) => group.freedBytes),
    column("before", "Before", "in use at the earlier instant", (group) => group.beforeBytes),
    column("after", "After", "in use at the later instant", (group) => group.numBytes),
  ];
}
