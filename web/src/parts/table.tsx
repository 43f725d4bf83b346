/** A table of any length that sorts, filters by search and selection, and handles keys. */
import type { ComponentChildren } from "preact";
import { useEffect, useId, useMemo, useState } from "preact/hooks";
import { nameFile, saveText } from "../exports/download";
import { registerTable, tableToCsv } from "../exports/tables";
import { isInSelection, moduleName, select, selected } from "../store/modules";
import { words } from "../store/search";
import { Empty } from "./empty_message";
import { Highlight } from "./highlight";
import { filterAndSortRows, nextSort, type Sort, type Sortable, type Value } from "./table_rows";
import { formatNumber, pluralize } from "./units";
import { useVirtualRows } from "./virtual_rows";

export interface Column extends Sortable {
  readonly title: string;
  readonly hint?: string; // tooltip of the column's head
  readonly width: number; // minimum, in rem
  readonly grow?: number; // flex share of the remaining width
  readonly align?: "end";
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
  readonly detail?: (row: number) => ComponentChildren; // details of the active row
  readonly active?: number; // a row that was selected elsewhere; -1 is none
  readonly onActive?: (row: number) => void; // -1 is none
  readonly height?: string; // maximum, as CSS
}

/** Whether a row belongs to the selected module or its descendants. */
function isAboutSelection(
  modules: number | readonly number[],
  isSelected: (module: number) => boolean,
): boolean {
  return typeof modules === "number" ? isSelected(modules) : modules.some(isSelected);
}

function useRows(props: TableProps, sort: Sort | null): number[] {
  const { numRows, columns, isShown, modules, isSelected = isInSelection } = props;
  const searchWords = words.value;
  const module = selected.value;
  return useMemo(() => {
    const isRowShown = (row: number): boolean =>
      (!isShown || isShown(row)) &&
      (module < 0 || !modules || isAboutSelection(modules(row), isSelected));
    return filterAndSortRows({ numRows, columns, sort, words: searchWords, isShown: isRowShown });
  }, [numRows, columns, sort, searchWords, isShown, module, modules, isSelected]);
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
  const { label, numRows, columns, empty, modules, detail, onActive } = props;
  const [sort, setSort] = useState<Sort | null>(props.sort ?? null);
  const [active, setActive] = useState(-1); // a row, not its index in `rows`
  const id = useId();
  const rows = useRows(props, sort);
  const { ref, rowHeight, scrollToRow, revealRow, first, end } = useVirtualRows(rows.length);
  const activeIndex = rows.indexOf(active);
  const activate = (row: number): void => {
    setActive(row);
    onActive?.(row);
  };
  useEffect(() => {
    if (ref.current) registerTable(ref.current, () => ({ label, columns, rows }));
  });
  useEffect(() => {
    if (ref.current) ref.current.scrollTop = 0;
  }, [sort, rows.length]);
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
      activate(rows[next]!);
      scrollToRow(next);
    } else if (event.key === "Enter" && activeIndex >= 0 && modules) {
      const rowModules = modules(active);
      const module = typeof rowModules === "number" ? rowModules : (rowModules[0] ?? -1);
      if (module >= 0) select(module);
    } else if (event.key === "Escape" && active >= 0) {
      event.stopPropagation();
      activate(-1);
    }
  };
  const template = columns
    .map(({ width, grow }) => (grow ? `minmax(${width}rem, ${grow}fr)` : `${width}rem`))
    .join(" ");
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
          activeIndex >= first && activeIndex < end ? `${id}-${active}` : undefined
        }
        style={{ "--columns": template, maxHeight: props.height }}
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
              {columns.map((column) => (
                <Cell key={column.id} column={column} row={row} />
              ))}
            </div>
          ))}
        </div>
      </div>
      <Foot
        numShown={rows.length}
        numRows={numRows}
        hasModules={modules !== undefined}
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
            <button type="button" title={column.hint} onClick={() => onSort(column)}>
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

function Cell({ column, row }: { column: Column; row: number }) {
  const value = column.value(row);
  const text = value === null ? "" : String(value);
  return (
    <div class={column.align === "end" ? "cell cell-end" : "cell"} role="gridcell">
      {column.cell ? (
        column.cell(row)
      ) : (
        <span class="clip" title={text}>
          <Highlight text={text} />
        </span>
      )}
    </div>
  );
}

interface FootProps {
  readonly numShown: number;
  readonly numRows: number;
  readonly hasModules: boolean;
  readonly onSave: () => void;
}

/** Number of rows shown, and the module that they are filtered by. */
function Foot({ numShown, numRows, hasModules, onSave }: FootProps) {
  const isFiltered = hasModules && selected.value >= 0;
  return (
    <div class="table-bottom">
      <div class="table-foot" role="status">
        {numShown === numRows
          ? pluralize(numRows, "row")
          : `${formatNumber(numShown)} of ${pluralize(numRows, "row")}`}
        {isFiltered && (
          <>
            {" in "}
            <b>{moduleName(selected.value)}</b>
            <button type="button" class="text-button" onClick={() => select(-1)}>
              show all modules
            </button>
          </>
        )}
      </div>
      <button
        type="button"
        class="text-button table-save"
        title="Save these rows as a CSV file"
        onClick={onSave}
      >
        CSV
      </button>
    </div>
  );
}
