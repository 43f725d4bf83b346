/** Which rows of a table are shown, and in which order. */
import { containsWords } from "../store/search";

export type Value = string | number | null;

export interface Sort {
  readonly column: string;
  readonly isDescending: boolean;
}

export interface Sortable {
  readonly id: string;
  readonly value: (row: number) => Value;
  readonly isText?: boolean;
}

/** `-wire` sorts by the column `wire` from the highest value. */
export function parseSort(text: string | undefined): Sort | null {
  if (!text) return null;
  const isDescending = text.startsWith("-");
  return { column: isDescending ? text.slice(1) : text, isDescending };
}

export function formatSort({ column, isDescending }: Sort): string {
  return `${isDescending ? "-" : ""}${column}`;
}

interface RowQuery {
  readonly numRows: number;
  readonly columns: readonly Sortable[];
  readonly sort: Sort | null;
  readonly words: readonly string[];
  readonly isShown?: ((row: number) => boolean) | undefined;
}

export function filterAndSortRows({ numRows, columns, sort, words, isShown }: RowQuery): number[] {
  const rows: number[] = [];
  for (let row = 0; row < numRows; row++) {
    if (
      (!isShown || isShown(row)) &&
      (!words.length || containsWords(joinText(row, columns), words))
    ) {
      rows.push(row);
    }
  }
  const column = sort && columns.find((candidate) => candidate.id === sort.column);
  return column ? sortRows(rows, column.value, sort.isDescending) : rows;
}

/** The text of all columns of a row. */
function joinText(row: number, columns: readonly Sortable[]): string {
  let text = "";
  for (const { value } of columns) {
    const cell = value(row);
    if (typeof cell === "string") text += `${cell}\n`;
  }
  return text;
}

/** Stable sort; rows without a value come last. */
function sortRows(rows: number[], value: (row: number) => Value, isDescending: boolean): number[] {
  const sign = isDescending ? -1 : 1;
  const keys = new Map(rows.map((row) => [row, value(row)]));
  return rows.sort((a, b) => compare(keys.get(a)!, keys.get(b)!, sign) || a - b);
}

const collator = new Intl.Collator("en", { numeric: true });

function compare(a: Value, b: Value, sign: number): number {
  if (a === b) return 0;
  if (a === null || a === "") return 1;
  if (b === null || b === "") return -1;
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  return sign * collator.compare(String(a), String(b));
}

/** The sort order after a click on a column's head: numbers descending first, text ascending first. */
export function nextSort(sort: Sort | null, column: Sortable, start: Sort | null): Sort | null {
  const isDescending = !column.isText;
  if (sort?.column !== column.id) return { column: column.id, isDescending };
  if (sort.isDescending === isDescending) return { column: column.id, isDescending: !isDescending };
  return start;
}
