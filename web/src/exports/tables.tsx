/** Tables as CSV and Markdown: all rows that pass the filters, in their order, not only those drawn. */
import { render } from "preact";
import type { Column } from "../parts/table";
import type { Value } from "../parts/table_rows";

export interface ShownTable {
  readonly label: string;
  readonly columns: readonly Column[];
  readonly rows: readonly number[];
}

const shownTables = new WeakMap<Element, () => ShownTable>();

/** Makes a table on the page known to exports, which read it when they are asked to. */
export function registerTable(element: Element, read: () => ShownTable): void {
  shownTables.set(element, read);
}

export function findTable(element: Element): ShownTable | null {
  return shownTables.get(element)?.() ?? null;
}

// A spreadsheet evaluates a cell that starts with these as a formula; the same as in Python's CSV.
const FORMULA = /^[=+\-@]/;

function makeCell(value: Value): string {
  if (value === null) return "";
  if (typeof value === "number") return String(value);
  const safe = FORMULA.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

export function writeCsv(rows: readonly (readonly Value[])[]): string {
  return rows.map((row) => `${row.map(makeCell).join(",")}\n`).join("");
}

/** Values as numbers and texts, without units. */
export function tableToCsv({ columns, rows }: ShownTable): string {
  return writeCsv([
    columns.map((column) => column.title || column.id),
    ...rows.map((row) => columns.map((column) => (column.exported ?? column.value)(row))),
  ]);
}

const MAX_ROWS = 200;

/** Cells as they are displayed; long tables are cut, and say so. */
export function tableToMarkdown({ columns, rows }: ShownTable): string {
  const shown = rows.slice(0, MAX_ROWS);
  const lines = [
    columns.map((column) => column.title || column.id),
    columns.map((column) => (column.align === "end" ? "--:" : "---")),
    ...readCells(columns, shown),
  ].map((cells) => `| ${cells.join(" | ")} |`);
  const numLeft = rows.length - shown.length;
  if (numLeft) lines.push("", `… and ${numLeft} more rows; the CSV has all of them.`);
  return lines.join("\n");
}

function readCells(columns: readonly Column[], rows: readonly number[]): string[][] {
  const host = document.createElement("div");
  render(
    <div>
      {rows.map((row) => (
        <div key={row}>
          {columns.map((column) => (
            <div key={column.id}>
              {column.cell ? column.cell(row) : String(column.value(row) ?? "")}
            </div>
          ))}
        </div>
      ))}
    </div>,
    host,
  );
  const cells = [...(host.firstElementChild?.children ?? [])].map((row) =>
    [...row.children].map((cell) => escapeMarkdown(cell.textContent?.trim() ?? "")),
  );
  render(null, host);
  return cells;
}

/** Text that Markdown shows as it is, on one line and within a cell. */
export function escapeMarkdown(text: string): string {
  return text.replace(/\s+/g, " ").replace(/[\\`*_{}[\]<>|#~]/g, "\\$&");
}
