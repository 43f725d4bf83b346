/** A table of any length that sorts, filters by search and selection, and handles keys. */
import type { ComponentChildren } from "preact";
import { useEffect, useId, useMemo, useState } from "preact/hooks";
import { nameFile, saveText } from "../exports/download";
import { registerTable, tableToCsv } from "../exports/tables";
import { hasModuleSelection, isInSelection, select, selectedName } from "../store/modules";
import { param, setParam } from "../store/route";
import { words } from "../store/search";
import { isRankSelected, isSourceSelected, selection } from "../store/selection";
import { arrangeColumns, countLines, listTracks } from "./column_layout";
import { Empty } from "./empty_message";
import { InCell } from "./facet_link";
import { Highlight, InLines } from "./highlight";
import { isNarrow } from "./narrow";
import { TableFoot } from "./table_foot";
import {
  filterAndSortRows,
  formatSort,
  nextSort,
  parseSort,
  type Sort,
  type Sortable,
  type Value,
} from "./table_rows";
import { meaningOf } from "./term";
import { tip } from "./tooltip";
import { findMaxRows, useVirtualRows } from "./virtual_rows";

export interface Column extends Sortable {
  readonly title: string;
  readonly hint?: string; // tooltip of the column's head
  readonly width: number; // minimum, in rem
  readonly grow?: number; // flex share of the remaining width
  readonly align?: "end";
  readonly isNeverCut?: boolean; // its texts, such as ops and lines, are never cut off
  readonly texts?: readonly string[]; // of its cells, if those are not the values
  readonly narrowPlace?: number; // among columns of a narrow screen; figures have 2, others 3
  readonly cell?: (row: number) => ComponentChildren; // in place of the value
  readonly exported?: (row: number) => Value; // likewise in a CSV file
}

export interface TableProps {
  readonly label: string;
  readonly numRows: number;
  readonly columns: readonly Column[];
  readonly empty: string; // the sentence shown without rows
  readonly sort?: Sort;
  readonly isShown?: (row: number) => boolean; // filters of the view; memoise it
  readonly modules?: (row: number) => number | readonly number[]; // that the row belongs to
  readonly isSelected?: (module: number) => boolean; // isFoldedRowInSelection for folded rows
  readonly sources?: (row: number) => number | readonly number[]; // lines that the row is about
  readonly ranks?: (row: number) => string; // ranks that the row is about
  readonly detail?: (row: number) => ComponentChildren; // details of the active row
  readonly active?: number; // a row that was selected elsewhere; -1 is none
  readonly onActive?: (row: number) => void; // -1 is none
  readonly height?: string; // maximum, as CSS
  readonly maxLines?: number; // of a row on a narrow screen
  readonly served?: ServedTable; // if a server filters and sorts the rows
}

/** Rows that a server has filtered and sorted; the table asks for those in sight. */
export interface ServedTable {
  readonly numRows: number;
  readonly show: (first: number, end: number) => void;
}

/** Whether a position is selected, or one of several. */
function isAnySelected(
  positions: number | readonly number[],
  isSelected: (position: number) => boolean,
): boolean {
  return typeof positions === "number" ? isSelected(positions) : positions.some(isSelected);
}

function useRows(props: TableProps, sort: Sort | null): number[] {
  const { numRows, columns, isShown, modules, isSelected = isInSelection, sources, ranks } = props;
  const searchWords = words.value;
  const numServed = props.served && Math.min(props.served.numRows, findMaxRows());
  const [module, { line, rank }] = [
    hasModuleSelection.value && selectedName.value,
    selection.value,
  ];
  return useMemo(() => {
    if (numServed !== undefined) return Array.from({ length: numServed }, (_, row) => row);
    const isRowShown = (row: number): boolean =>
      (!isShown || isShown(row)) &&
      (module === false || !modules || isAnySelected(modules(row), isSelected)) &&
      (!line || !sources || isAnySelected(sources(row), isSourceSelected)) &&
      (!ranks || isRankSelected(ranks(row)));
    return filterAndSortRows({ numRows, columns, sort, words: searchWords, isShown: isRowShown });
  }, [
    numServed,
    numRows,
    columns,
    sort,
    searchWords,
    isShown,
    module,
    modules,
    isSelected,
    sources,
    line,
    ranks,
    rank,
  ]);
}

interface SortState {
  readonly sort: Sort | null;
  readonly setSort: (sort: Sort | null) => void;
  readonly unknown: string; // a column in the address that the table does not have
}

/** The sort order, which is kept in the address. */
function useSort({ label, columns, ...props }: TableProps): SortState {
  const initial = props.sort ?? null;
  const name = `sort.${label.replaceAll(" ", "-")}`;
  const requested = parseSort(param(name));
  const isKnown = columns.some(({ id }) => id === requested?.column);
  const text = isKnown ? param(name) : undefined;
  return {
    sort: useMemo(() => parseSort(text) ?? initial, [text, initial?.column]),
    setSort: (next) => setParam(name, next && next !== initial ? formatSort(next) : null),
    unknown: requested && !isKnown ? requested.column : "",
  };
}

const KEY_STEPS: Readonly<Record<string, number>> = {
  ArrowDown: 1,
  ArrowUp: -1,
  PageDown: 12,
  PageUp: -12,
  Home: Number.NEGATIVE_INFINITY,
  End: Number.POSITIVE_INFINITY,
};

export function Table(props: TableProps) {
  const { label, numRows, empty, modules, detail, onActive } = props;
  const columns = useMemo(
    () => arrangeColumns(props.columns, numRows),
    [props.columns, isNarrow.value],
  );
  const numLines = useMemo(() => countLines(columns[0], numRows, props.maxLines), [columns]);
  const tracks = useMemo(() => listTracks(columns, numRows), [columns]);
  const { sort, setSort, unknown } = useSort(props);
  const [active, setActive] = useState(-1); // a row, not its index in `rows`
  const [activeColumn, setActiveColumn] = useState(-1); // of the active row; -1 is the row itself
  const id = useId();
  const rows = useRows(props, sort);
  const { ref, rowHeight, scrollToRow, revealRow, first, end } = useVirtualRows(
    rows.length,
    numLines,
  );
  const activeIndex = rows.indexOf(active);
  const activate = (row: number): void => {
    setActive(row);
    setActiveColumn(-1);
    onActive?.(row);
  };
  const cellId = (column: number): string => `${id}-${active}-${column}`;
  useEffect(() => {
    if (ref.current) registerTable(ref.current, () => ({ label, columns, rows }));
  });
  useEffect(() => {
    if (ref.current) ref.current.scrollTop = 0;
  }, [sort, rows.length]);
  useEffect(() => props.served?.show(first, end), [first, end, columns]);
  useEffect(() => {
    if (props.served) setActive(-1); // a row's number is its place in the server's order
  }, [columns]);
  useEffect(() => {
    if (props.active === undefined || props.active === active) return;
    setActive(props.active);
    if (rows.includes(props.active)) revealRow(rows.indexOf(props.active));
  }, [props.active]);
  if (!numRows) return <Empty>{empty}</Empty>;

  const handleKey = (event: KeyboardEvent): void => {
    const step = KEY_STEPS[event.key];
    if (step !== undefined && rows.length) {
      event.preventDefault();
      const next = Math.min(Math.max(activeIndex + step, 0), rows.length - 1);
      const column = activeColumn;
      activate(rows[next]!);
      setActiveColumn(column);
      scrollToRow(next);
    } else if ((event.key === "ArrowRight" || event.key === "ArrowLeft") && activeIndex >= 0) {
      event.preventDefault();
      const column = activeColumn + (event.key === "ArrowRight" ? 1 : -1);
      const next = Math.min(Math.max(column, -1), columns.length - 1);
      setActiveColumn(next);
      document
        .getElementById(cellId(next))
        ?.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else if (event.key === "Enter" && activeIndex >= 0 && activeColumn >= 0) {
      const cell = document.getElementById(cellId(activeColumn));
      cell?.querySelector<HTMLElement>("a, button")?.click();
    } else if (event.key === "Enter" && activeIndex >= 0 && modules) {
      const rowModules = modules(active);
      const module = typeof rowModules === "number" ? rowModules : (rowModules[0] ?? -1);
      if (module >= 0) select(module);
    } else if (event.key === "Escape" && active >= 0) {
      event.stopPropagation();
      activate(-1);
    }
  };
  return (
    <div class="table-frame">
      <div
        ref={ref}
        class="table"
        role="grid"
        tabIndex={0}
        aria-label={label}
        aria-rowcount={rows.length + 1}
        aria-colcount={columns.length}
        aria-activedescendant={
          activeIndex < first || activeIndex >= end
            ? undefined
            : activeColumn < 0
              ? `${id}-${active}`
              : cellId(activeColumn)
        }
        style={{ "--columns": tracks, maxHeight: props.height }}
        onKeyDown={handleKey}
      >
        <Head
          columns={columns}
          sort={sort}
          onSort={(column) => setSort(nextSort(sort, column, props.sort ?? null))}
        />
        <div class="table-body" role="rowgroup" style={{ height: `${rows.length * rowHeight}px` }}>
          {rows.slice(first, end).map((row, i) => (
            // biome-ignore lint/a11y/useKeyWithClickEvents: the table handles the keys of all its rows
            <div
              key={row}
              id={`${id}-${row}`}
              class="table-row"
              role="row"
              aria-rowindex={first + i + 2}
              aria-selected={row === active}
              style={{ top: `${(first + i) * rowHeight}px`, height: `${rowHeight}px` }}
              onClick={() => activate(row === active && !detail ? -1 : row)}
            >
              {columns.map((column, at) => (
                <Cell
                  key={column.id}
                  id={row === active ? cellId(at) : undefined}
                  column={column}
                  row={row}
                  isActive={row === active && at === activeColumn}
                  hasLines={at === 0 && isNarrow.value}
                />
              ))}
            </div>
          ))}
        </div>
      </div>
      <TableFoot
        numShown={rows.length}
        numRows={numRows}
        hasModules={modules !== undefined}
        unknownSort={unknown}
        onClearSort={() => setSort(null)}
        onSave={() =>
          saveText(nameFile(label, ".csv"), tableToCsv({ label, columns, rows }), "text/csv")
        }
      />
      {detail && activeIndex >= 0 && (
        <div class="table-detail">
          <button type="button" class="close" aria-label="close" onClick={() => activate(-1)}>
            ×
          </button>
          {detail(active)}
        </div>
      )}
    </div>
  );
}

interface HeadProps {
  readonly columns: readonly Column[];
  readonly sort: Sort | null;
  readonly onSort: (column: Column) => void;
}

function Head({ columns, sort, onSort }: HeadProps) {
  return (
    <div class="table-row table-head" role="row" aria-rowindex={1}>
      {columns.map((column) => {
        const order =
          sort?.column === column.id && (sort.isDescending ? "descending" : "ascending");
        return (
          <div
            key={column.id}
            class={column.align === "end" ? "cell cell-end" : "cell"}
            role="columnheader"
            aria-sort={order || "none"}
          >
            <button type="button" {...explain(column)} onClick={() => onSort(column)}>
              {column.title}
              <span class="sort-mark" aria-hidden="true">
                {order ? (order === "descending" ? "↓" : "↑") : ""}
              </span>
            </button>
          </div>
        );
      })}
    </div>
  );
}

/** The hint of a column and the glossary's meaning of its title, on hover and on focus. */
function explain({ title, hint }: Column): object {
  const meaning = meaningOf(title);
  const words = [hint, meaning].filter(Boolean).join("; ");
  return words ? { ...tip(words), "aria-description": words } : {};
}

interface CellProps {
  readonly id: string | undefined;
  readonly column: Column;
  readonly row: number;
  readonly isActive: boolean; // arrow keys have moved to it
  readonly hasLines: boolean; // as many as its text needs
}

function Cell({ id, column, row, isActive, hasLines }: CellProps) {
  const value = column.value(row);
  const text = value === null ? "" : String(value);
  const classes = ["cell", column.align === "end" && "cell-end", isActive && "cell-active"];
  return (
    <div id={id} class={classes.filter(Boolean).join(" ")} role="gridcell">
      <InCell.Provider value={true}>
        <InLines.Provider value={hasLines}>
          {column.cell ? (
            column.cell(row)
          ) : (
            <span class="clip" title={text}>
              <Highlight text={text} />
            </span>
          )}
        </InLines.Provider>
      </InCell.Provider>
    </div>
  );
}
