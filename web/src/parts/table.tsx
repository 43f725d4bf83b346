/** A table of any length: it sorts, filters by the search and the selection, and takes keys. */
import type { ComponentChildren } from "preact";
import { useEffect, useId, useMemo, useState } from "preact/hooks";
import { isInSelection, nameOf, select, selected } from "../store/modules";
import { words } from "../store/search";
import { arrangeRows, nextSort, type Sort, type Sortable } from "./arrange";
import { Empty } from "./empty";
import { Highlight } from "./highlight";
import { countOf, formatNumber } from "./units";
import { useWindow } from "./windowed";

export interface Column extends Sortable {
  readonly title: string;
  readonly hint?: string; // what the figures are
  readonly width: number; // the least, in rem
  readonly grow?: number; // its share of what is left
  readonly align?: "end";
  readonly cell?: (row: number) => ComponentChildren; // in place of the value
}

export interface TableProps {
  readonly label: string;
  readonly numRows: number;
  readonly columns: readonly Column[];
  readonly empty: string; // a sentence for when there are no rows at all
  readonly sort?: Sort;
  readonly isShown?: (row: number) => boolean; // filters of the view; memoise it
  readonly modules?: (row: number) => number | readonly number[]; // that the row is about
  readonly isSelected?: (module: number) => boolean; // isLikeSelection for folded rows
  readonly detail?: (row: number) => ComponentChildren; // more on the active row
  readonly active?: number; // a row that was chosen elsewhere: it is shown; -1 is none
  readonly onActive?: (row: number) => void; // -1 where none is
  readonly height?: string; // the most, as CSS
}

/** Whether a row is about the selected module or what is below it. */
function isOfSelection(
  modules: number | readonly number[],
  isSelected: (module: number) => boolean,
): boolean {
  return typeof modules === "number" ? isSelected(modules) : modules.some(isSelected);
}

function useRows(props: TableProps, sort: Sort | null): number[] {
  const { numRows, columns, isShown, modules, isSelected = isInSelection } = props;
  const wanted = words.value;
  const module = selected.value;
  return useMemo(() => {
    const isKept = (row: number): boolean =>
      (!isShown || isShown(row)) &&
      (module < 0 || !modules || isOfSelection(modules(row), isSelected));
    return arrangeRows({ numRows, columns, sort, words: wanted, isShown: isKept });
  }, [numRows, columns, sort, wanted, isShown, module, modules, isSelected]);
}

const MOVES: Readonly<Record<string, number>> = {
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
  const [active, setActive] = useState(-1); // a row, not its place
  const id = useId();
  const rows = useRows(props, sort);
  const { ref, rowHeight, bring, present, first, end } = useWindow(rows.length);
  const place = rows.indexOf(active);
  const activate = (row: number): void => {
    setActive(row);
    onActive?.(row);
  };
  useEffect(() => {
    if (ref.current) ref.current.scrollTop = 0;
  }, [sort, rows.length]);
  useEffect(() => {
    if (props.active === undefined || props.active === active) return;
    setActive(props.active);
    if (rows.includes(props.active)) present(rows.indexOf(props.active));
  }, [props.active]);
  if (!numRows) return <Empty>{empty}</Empty>;

  const move = (event: KeyboardEvent): void => {
    const step = MOVES[event.key];
    if (step !== undefined && rows.length) {
      event.preventDefault();
      const next = Math.min(Math.max(place + step, 0), rows.length - 1);
      activate(rows[next]!);
      bring(next);
    } else if (event.key === "Enter" && place >= 0 && modules) {
      const found = modules(active);
      const module = typeof found === "number" ? found : (found[0] ?? -1);
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
        aria-activedescendant={place >= first && place < end ? `${id}-${active}` : undefined}
        style={{ "--columns": template, maxHeight: props.height }}
        onKeyDown={move}
      >
        <Head
          columns={columns}
          sort={sort}
          onSort={(one) => setSort(nextSort(sort, one, props.sort ?? null))}
        />
        <div class="table-body" role="rowgroup" style={{ height: `${rows.length * rowHeight}px` }}>
          {rows.slice(first, end).map((row, i) => (
            // biome-ignore lint/a11y/useKeyWithClickEvents: the table takes the keys of all its rows
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
      <Foot numShown={rows.length} numRows={numRows} isOfModules={modules !== undefined} />
      {detail && place >= 0 && (
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
  readonly isOfModules: boolean;
}

/** How many of how many, and what keeps the others away. */
function Foot({ numShown, numRows, isOfModules }: FootProps) {
  const isNarrowed = isOfModules && selected.value >= 0;
  return (
    <div class="table-foot" role="status">
      {numShown === numRows
        ? countOf(numRows, "row")
        : `${formatNumber(numShown)} of ${countOf(numRows, "row")}`}
      {isNarrowed && (
        <>
          {" in "}
          <b>{nameOf(selected.value)}</b>
          <button type="button" class="text-button" onClick={() => select(-1)}>
            show all modules
          </button>
        </>
      )}
    </div>
  );
}
