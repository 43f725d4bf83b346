/** The module tree as a table, repeated layers folded. */
import { computed } from "@preact/signals";
import { useEffect, useId, useMemo, useRef, useState } from "preact/hooks";
import { Empty } from "../../parts/empty_message";
import { Highlight, InLines } from "../../parts/highlight";
import { isNarrow } from "../../parts/narrow";
import { formatNumber } from "../../parts/units";
import { useVirtualRows } from "../../parts/virtual_rows";
import { earlierModules } from "../../store/earlier_modules";
import { moduleTraffic, ownCollectives } from "../../store/module_traffic";
import { moduleName, representatives, selected } from "../../store/modules";
import { page } from "../../store/page";
import { words } from "../../store/search";
import { listColumns, type Show, type TreeColumn } from "./columns";
import { findRows, hasChildren, listRows } from "./tree_rows";
import {
  depths,
  show as expandTo,
  labelOf,
  numRepresented,
  selectedShown,
  selectShown,
  shown,
  toggleFold,
  toggleOpen,
  treeState,
} from "./tree_state";

const PAGE_ROWS = 12;
const NARROW_NAME_REM = 13;
const NARROW_COMPARED_REM = 10.5; // the same, beside a change
const LETTER_REM = 0.53; // width of a letter of the last column
const MAX_OWN_LETTERS = 120;

/** The width of the last column, whose texts are not cut off. */
function findOwnWidth(texts: Iterable<string>): number {
  let longest = 0;
  for (const text of texts) longest = Math.max(longest, text.length);
  return Math.max(14, LETTER_REM * Math.min(longest, MAX_OWN_LETTERS) + 1.8);
}

/** The own collectives of what each row represents. */
const ownText = computed(() => {
  const texts = new Map<number, string>();
  ownCollectives.value.forEach((text, i) => {
    const row = shown.value[i]!;
    const each = text && numRepresented.value[row]! > 1 ? `each ${text}` : text;
    const known = texts.get(row) ?? each;
    texts.set(row, known === each ? each : "not the same in each layer");
  });
  return texts;
});

export function Tree({ show }: { show: Show }) {
  const { modules } = page.value;
  const id = useId();
  const [phases, traffic] = [page.value.communication?.phases ?? [], moduleTraffic.value];
  const columns = useMemo(
    () => listColumns({ modules, phases, traffic, show, shown: shown.value }),
    [modules, traffic, show, shown.value, earlierModules.value],
  );
  const rows = useMemo(
    () =>
      words.value.length
        ? findRows(modules, words.value, representatives.value)
        : listRows(modules, treeState.value),
    [modules, treeState.value, words.value],
  );
  const [active, setActive] = useState(-1);
  const { ref, rowHeight, scrollToRow, revealRow, first, end } = useVirtualRows(rows.length);
  useRevealSelection(rows, revealRow, active, setActive);
  const activeIndex = rows.indexOf(active);
  const moveTo = (to: number): void => {
    const next = Math.min(Math.max(to, 0), rows.length - 1);
    setActive(rows[next]!);
    scrollToRow(next);
  };
  const ownRem = useMemo(() => findOwnWidth(ownText.value.values()), [ownText.value]);
  const widths = columns.map(({ width, hasBar }) => (hasBar && isNarrow.value ? 5.5 : width));
  const isCompared = columns.some(({ id: column }) => column === "change");
  const narrowRem = isCompared ? NARROW_COMPARED_REM : NARROW_NAME_REM;
  const template = `minmax(${isNarrow.value ? narrowRem : 19}rem, 36rem) ${widths.map((width) => `minmax(${width}rem, ${1.4 * width}rem)`).join(" ")} minmax(${ownRem}rem, 1fr)`;
  return (
    <div class="table-frame">
      <div
        ref={ref}
        class="table tree"
        role="treegrid"
        tabIndex={0}
        aria-label="modules"
        aria-rowcount={rows.length + 1}
        aria-activedescendant={
          activeIndex >= first && activeIndex < end ? `${id}-${active}` : undefined
        }
        style={{ "--columns": template }}
        onKeyDown={(event) => handleKey(event, active, activeIndex, moveTo)}
      >
        <TreeHead columns={columns} />
        <div class="table-body" role="rowgroup" style={{ height: `${rows.length * rowHeight}px` }}>
          {rows.slice(first, end).map((position, i) => (
            <TreeRow
              key={position}
              id={`${id}-${position}`}
              position={position}
              index={first + i}
              rowHeight={rowHeight}
              columns={columns}
              isActive={position === active}
              onActive={setActive}
            />
          ))}
        </div>
      </div>
      {!rows.length && <Empty>No module's path or type has these words.</Empty>}
    </div>
  );
}

/** Expands the tree and scrolls to a module that was selected elsewhere. */
function useRevealSelection(
  rows: number[],
  revealRow: (row: number) => void,
  active: number,
  setActive: (row: number) => void,
): void {
  const pendingModule = useRef(-1);
  const module = selected.value >= 0 ? selected.value : selectedShown.value;
  const isHidden = module >= 0 && !rows.includes(module);
  useEffect(() => {
    // A module that was selected here is visible already, and the rows should not jump.
    if (module < 0 || module === active) return;
    pendingModule.current = module;
    setActive(module);
    if (isHidden) expandTo(module);
  }, [module]);
  useEffect(() => {
    const activeIndex = rows.indexOf(module);
    if (activeIndex < 0 || pendingModule.current !== module) return;
    pendingModule.current = -1;
    revealRow(activeIndex);
  }, [module, isHidden]);
}

function handleKey(
  event: KeyboardEvent,
  active: number,
  activeIndex: number,
  moveTo: (to: number) => void,
): void {
  const { modules } = page.value;
  const isOpen = hasChildren(modules, active) && !treeState.value.closed.has(active);
  const actions: Readonly<Record<string, () => void>> = {
    ArrowDown: () => moveTo(activeIndex + 1),
    ArrowUp: () => moveTo(activeIndex - 1),
    PageDown: () => moveTo(activeIndex + PAGE_ROWS),
    PageUp: () => moveTo(activeIndex - PAGE_ROWS),
    Home: () => moveTo(0),
    End: () => moveTo(Number.POSITIVE_INFINITY),
    ArrowRight: () =>
      isOpen ? moveTo(activeIndex + 1) : hasChildren(modules, active) && toggleOpen(active),
    ArrowLeft: () => {
      const parent = modules.parent[active] ?? -1;
      if (isOpen) toggleOpen(active);
      else if (parent >= 0) moveTo(activeIndex - countBetween(parent, active));
    },
    Enter: () => active >= 0 && selectShown(active),
    " ": () => active >= 0 && (modules.repeat[active] ?? 1) > 1 && toggleFold(active),
  };
  const action = actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

/** Number of rows between a module and its parent. */
function countBetween(parent: number, position: number): number {
  const rows = words.value.length
    ? findRows(page.value.modules, words.value, representatives.value)
    : listRows(page.value.modules, treeState.value);
  return rows.indexOf(position) - rows.indexOf(parent);
}

function TreeHead({ columns }: { columns: readonly TreeColumn[] }) {
  return (
    <div class="table-row table-head" role="row" aria-rowindex={1}>
      <div class="cell" role="columnheader">
        Module
      </div>
      {columns.map((column) => (
        <div key={column.id} class="cell cell-end" role="columnheader" title={column.hint}>
          {capitalize(column.title)}
        </div>
      ))}
      <div class="cell" role="columnheader" title="excluding children">
        Own collectives
      </div>
    </div>
  );
}

function capitalize(title: string): string {
  return title.slice(0, 1).toUpperCase() + title.slice(1);
}

interface RowProps {
  readonly id: string;
  readonly position: number;
  readonly index: number;
  readonly rowHeight: number;
  readonly columns: readonly TreeColumn[];
  readonly isActive: boolean;
  readonly onActive: (position: number) => void;
}

function TreeRow({ id, position, index, rowHeight, columns, isActive, onActive }: RowProps) {
  const { modules } = page.value;
  const isParent = hasChildren(modules, position);
  return (
    // biome-ignore lint/a11y/useKeyWithClickEvents: the tree handles the keys of all its rows
    <div
      id={id}
      class={isActive ? "table-row row-active" : "table-row"}
      role="row"
      aria-level={depths.value[position]! + 1}
      aria-expanded={isParent ? !treeState.value.closed.has(position) : undefined}
      aria-selected={position === selectedShown.value}
      aria-rowindex={index + 2}
      style={{ top: `${index * rowHeight}px`, height: `${rowHeight}px` }}
      onClick={() => {
        onActive(position);
        selectShown(position);
      }}
    >
      <ModuleCell position={position} isParent={isParent} />
      {columns.map((column) => (
        <div key={column.id} class="cell cell-end" role="gridcell">
          {column.cell(position)}
        </div>
      ))}
      <div class="cell" role="gridcell">
        <span class="clip dim" title={ownText.value.get(position)}>
          {ownText.value.get(position)}
        </span>
      </div>
    </div>
  );
}

function ModuleCell({ position, isParent }: { position: number; isParent: boolean }) {
  const { modules } = page.value;
  const repeat = modules.repeat[position] ?? 1;
  const numFindings = modules.num_findings[position] ?? 0;
  const depth = depths.value[position]!;
  return (
    <div class="cell tree-cell" role="gridcell" style={{ "--depth": depth }}>
      {isParent ? <ExpandButton position={position} /> : <span class="expand-button" />}
      <span class="tree-name" title={moduleName(position)}>
        <InLines.Provider value={isNarrow.value}>
          <Highlight text={labelOf(position)} />
        </InLines.Provider>
      </span>
      {repeat > 1 && <FoldChip position={position} repeat={repeat} />}
      {numFindings > 0 && (
        <span class="chip chip-warn" title={`${numFindings} findings, including children`}>
          {formatNumber(numFindings)}
        </span>
      )}
      <span class="tree-extra">
        <span class="tree-type">
          <Highlight text={modules.type[position]!} />
        </span>
        {modules.marks[position] && (
          <span class="tree-marks" title={modules.marks[position]}>
            {modules.marks[position]}
          </span>
        )}
      </span>
    </div>
  );
}

function ExpandButton({ position }: { position: number }) {
  const isOpen = !treeState.value.closed.has(position) || words.value.length > 0;
  return (
    <button
      type="button"
      class="expand-button"
      tabIndex={-1}
      aria-label={isOpen ? "close" : "open"}
      onClick={(event) => {
        event.stopPropagation();
        toggleOpen(position);
      }}
    >
      <svg viewBox="0 0 16 16" aria-hidden="true" class={isOpen ? "is-open" : undefined}>
        <path d="m6 4 4 4-4 4" />
      </svg>
    </button>
  );
}

function FoldChip({ position, repeat }: { position: number; repeat: number }) {
  const isUnfolded = treeState.value.unfolded.has(position);
  const hint = isUnfolded
    ? "fold them again"
    : `${repeat} identical layers; figures are sums of them all. Show each`;
  return (
    <button
      type="button"
      class="chip"
      tabIndex={-1}
      aria-pressed={isUnfolded}
      title={hint}
      onClick={(event) => {
        event.stopPropagation();
        toggleFold(position);
      }}
    >
      ×{formatNumber(repeat)}
    </button>
  );
}
