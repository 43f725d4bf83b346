/** Widths and order of the columns of a table, as its texts and the screen need them. */
import { isNarrow } from "./narrow";
import { shortenPath } from "./source_line";
import type { Column } from "./table";
import { MAX_LINES } from "./virtual_rows";

const LETTER_REM = 0.56; // width of a letter in a cell, on average
const WIDE_REM = 0.08; // more for each of the first, as a short text may be all digits
const MAX_WIDE = 16;
const MARK_REM = 3; // of a badge or a number beside a text
const TITLE_LETTER_REM = 0.55; // width of a letter of a title
const SORT_MARK_REM = 0.5;
const PADDING_REM = 1.8;
const MAX_LETTERS = 90; // of a column whose texts are never cut off
const NARROW_REM = 25.2; // width of a table on a narrow screen
const MIN_FIRST_REM = 9; // width of its first column, at least and at most
const MAX_FIRST_REM = 16;
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
  const fitting = columns.map((column) => (column.isNeverCut ? fitTexts(column, numRows) : column));
  if (!isNarrow.value) return fitting.map(fitTitle);
  const placed = fitting
    .map((column, at) => ({ column, at, place: placeOf(column, at) }))
    .sort((a, b) => a.place - b.place || a.at - b.at)
    .map(({ column }) => narrowColumn(column));
  const [first, ...others] = placed;
  if (!first) return [];
  const firstRem = others[0]?.narrowPlace === SECOND ? SHORT_REM : widthBeside(others);
  return [{ ...first, width: Math.min(Math.max(first.width, MIN_FIRST_REM), firstRem) }, ...others];
}

const SECOND = 1; // place of a verdict, which is more important than figures

function narrowColumn(column: Column): Column {
  if (column.narrowPlace === SECOND) {
    return { ...column, width: Math.min(column.width, SHORT_REM) };
  }
  return column.align === "end" ? { ...column, width: narrowFigure(column) } : column;
}

/** The width of the first column that leaves room for as many figures as fit, none of them cut. */
function widthBeside(others: readonly Column[]): number {
  let left = NARROW_REM;
  for (const { align, width } of others) {
    if (align !== "end" || left - width < MIN_FIRST_REM) break;
    left -= width;
  }
  return Math.min(left, MAX_FIRST_REM);
}

/**
 * The tracks of a table's grid. Growing columns are no wider than what they show, so that columns
 * stay beside each other on a wide screen; a last, empty track has the rest.
 */
export function listTracks(columns: readonly Column[], numRows: number): string {
  const tracks = columns.map((column) => {
    const width = `${column.width}rem`;
    return column.grow ? `minmax(${width}, ${widestUse(column, numRows)}rem)` : width;
  });
  return [...tracks, "minmax(0, 1fr)"].join(" ");
}

/** The width that a growing column makes use of: of its texts, or of its bar. */
function widestUse(column: Column, numRows: number): number {
  if (column.align === "end") return 2 * column.width;
  return Math.max(column.width, fitTexts(column, numRows).width + MARK_REM);
}

function placeOf({ narrowPlace, align }: Column, at: number): number {
  return narrowPlace ?? (at === 0 ? 0 : align === "end" ? 2 : 3);
}

function narrowFigure({ width }: Column): number {
  return width > MAX_FIGURE_REM ? NARROW_FIGURE_REM : width;
}

function fitTitle(column: Column): Column {
  const fitting = TITLE_LETTER_REM * column.title.length + PADDING_REM + SORT_MARK_REM;
  return column.width < fitting ? { ...column, width: fitting } : column;
}

function fitTexts(column: Column, numRows: number): Column {
  const numLetters = Math.min(findLongest(column, numRows), MAX_LETTERS);
  const fitting = LETTER_REM * numLetters + WIDE_REM * Math.min(numLetters, MAX_WIDE) + PADDING_REM;
  return { ...column, width: Math.max(column.width, fitting) };
}

function findLongest(column: Column, numRows: number): number {
  let longest = 0;
  for (const text of listTexts(column, numRows)) {
    longest = Math.max(longest, shortenPath(text).length);
  }
  return longest;
}

function* listTexts({ texts, value }: Column, numRows: number): Iterable<string> {
  if (texts) yield* texts;
  else for (let row = 0; row < Math.min(numRows, MAX_ROWS); row++) yield String(value(row) ?? "");
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
  for (const text of listTexts(column, numRows)) {
    most = Math.max(most, wrapText(text, numLetters));
    if (most >= maxLines) break;
  }
  return Math.min(most, maxLines);
}

/** The parts of a text between which it may be broken: words, and the parts of a dotted name. */
export function splitNames(text: string): string[] {
  return text.split(/(?<=[ ._/])/);
}

/** The number of lines of a text, whose parts are broken only if a line is too short for them. */
export function wrapText(text: string, numLetters: number): number {
  let [lines, used] = [1, 0];
  for (const part of splitNames(text)) {
    if (used > 0 && used + part.trimEnd().length > numLetters) {
      lines += 1;
      used = 0;
    }
    used += part.length;
    if (used > numLetters) {
      lines += Math.ceil(used / numLetters) - 1;
      used %= numLetters;
    }
  }
  return lines;
}
