/** Widths and order of the columns of a table, as its texts and the screen need them. */
import { isNarrow } from "./narrow";
import { shortenPath } from "./source_line";
import type { Column } from "./table";
import { MAX_LINES } from "./virtual_rows";

const LETTER_REM = 0.6; // width of a letter in a cell
const PADDING_REM = 1.8;
const MAX_LETTERS = 90; // of a column whose texts are never cut off
const NARROW_REM = 12.5; // width of the first column on a narrow screen
const SHORT_REM = 9.5; // the same, if a column that is not a figure comes second; and of that
const NARROW_FIGURE_REM = 5.5; // of a figure beside its bar, which a narrow screen leaves out
const MAX_FIGURE_REM = 8; // a wider column has a bar
const LETTERS_PER_REM = 1.75; // of the first column on a narrow screen
const MAX_ROWS = 5_000; // that are measured

/**
 * Makes columns whose texts must not be cut off as wide as their longest text. On a narrow screen
 * figures come right after the first column, so that they are visible without scrolling.
 */
export function arrangeColumns(columns: readonly Column[], numRows: number): readonly Column[] {
  const wide = columns.map((column) => (column.isNeverCut ? fitTexts(column, numRows) : column));
  if (!isNarrow.value) return wide;
  const placed = wide
    .map((column, at) => ({ column, at, place: placeOf(column, at) }))
    .sort((a, b) => a.place - b.place || a.at - b.at)
    .map(({ column, at }) => ({ ...column, width: Math.min(column.width, columns[at]!.width) }));
  const firstRem = placed[1]?.narrowPlace === SECOND ? SHORT_REM : NARROW_REM;
  return placed.map((column, at) => {
    if (at === 0) return { ...column, width: Math.min(Math.max(column.width, 9), firstRem) };
    if (column.narrowPlace === SECOND) {
      return { ...column, width: Math.min(column.width, SHORT_REM) };
    }
    return column.align === "end" ? { ...column, width: narrowFigure(column) } : column;
  });
}

const SECOND = 1; // place of a verdict, which is more important than figures

function placeOf({ narrowPlace, align }: Column, at: number): number {
  return narrowPlace ?? (at === 0 ? 0 : align === "end" ? 2 : 3);
}

function narrowFigure({ width }: Column): number {
  return width > MAX_FIGURE_REM ? NARROW_FIGURE_REM : width;
}

function fitTexts(column: Column, numRows: number): Column {
  const fitting = LETTER_REM * Math.min(findLongest(column, numRows), MAX_LETTERS) + PADDING_REM;
  return { ...column, width: Math.max(column.width, fitting) };
}

function findLongest(column: Column, numRows: number): number {
  let longest = 0;
  for (let row = 0; row < Math.min(numRows, MAX_ROWS); row++) {
    longest = Math.max(longest, shortenPath(String(column.value(row) ?? "")).length);
  }
  return longest;
}

/** The most lines that a cell of the first column has on a narrow screen. */
export function countLines(
  column: Column | undefined,
  numRows: number,
  maxLines = MAX_LINES,
): number {
  if (!isNarrow.value || !column) return 1;
  const numLetters = LETTERS_PER_REM * (column.width - 1);
  let most = 1;
  for (let row = 0; row < Math.min(numRows, MAX_ROWS) && most < maxLines; row++) {
    most = Math.max(most, wrapText(String(column.value(row) ?? ""), numLetters));
  }
  return Math.min(most, maxLines);
}

/** The number of lines of a text, whose words are broken only if a line is too short for them. */
export function wrapText(text: string, numLetters: number): number {
  let [lines, used] = [1, 0];
  for (const word of text.split(" ")) {
    if (used > 0 && used + 1 + word.length > numLetters) {
      lines += 1;
      used = 0;
    }
    used += word.length + (used > 0 ? 1 : 0);
    if (used > numLetters) {
      lines += Math.ceil(used / numLetters) - 1;
      used %= numLetters;
    }
  }
  return lines;
}
