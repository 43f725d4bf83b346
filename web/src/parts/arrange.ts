/** Which rows of a table are shown, and in which order. */
import { hasWords } from "../store/search";

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

interface Wanted {
  readonly numRows: number;
  readonly columns: readonly Sortable[];
  readonly sort: Sort | null;
  readonly words: readonly string[];
  readonly isShown?: ((row: number) => boolean) | undefined;
}

export function arrangeRows({ numRows, columns, sort, words, isShown }: Wanted): number[] {
  const rows: number[] = [];
  for (let row = 0; row < numRows; row++) {
    if ((!isShown || isShown(row)) && (!words.length || hasWords(textOf(row, columns), words))) {
      rows.push(row);
    }
  }
  const column = sort && columns.find((one) => one.id === sort.column);
  return column ? sortRows(rows, column.value, sort.isDescending) : rows;
}

/** All words of a row, in whichever column they stand. */
function textOf(row: number, columns: readonly Sortable[]): string {
  let text = "";
  for (const { value } of columns) {
    const one = value(row);
    if (typeof one === "string") text += `${one}\n`;
  }
  return text;
}

/** Rows that are equal keep the order that Python gave them; those without a value come last. */
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

/** What a click on a column's head sorts by next: figures from the most, words from the first. */
export function nextSort(sort: Sort | null, column: Sortable, start: Sort | null): Sort | null {
  const isDescending = !column.isText;
  if (sort?.column !== column.id) return { column: column.id, isDescending };
  if (sort.isDescending === isDescending) return { column: column.id, isDescending: !isDescending };
  return start;
}
