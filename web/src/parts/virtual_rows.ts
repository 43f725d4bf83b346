/** Virtualized rows: only visible rows are drawn, however many there are. */
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { isNarrow } from "./narrow";

const ROW_REM = 2.125;
const NARROW_ROW_REM = 2.6; // if its first cell has two lines
const LINE_REM = 1.1;
export const MAX_LINES = 5;
const OVERSCAN = 8;
const ROWS_ABOVE = 3; // rows shown above a row that is revealed

export interface RowRange {
  readonly first: number;
  readonly end: number; // position after the last one
}

export function findVisibleRows(
  top: number,
  height: number,
  rowHeight: number,
  numRows: number,
): RowRange {
  const first = Math.max(Math.floor(top / rowHeight) - OVERSCAN, 0);
  const end = Math.min(Math.ceil((top + height) / rowHeight) + OVERSCAN, numRows);
  return { first: Math.min(first, Math.max(end, 0)), end };
}

/** The scroll offset that makes a row visible with the least movement. */
export function scrollTopToShow(
  row: number,
  top: number,
  height: number,
  rowHeight: number,
): number {
  if (row * rowHeight < top) return row * rowHeight;
  if ((row + 1) * rowHeight > top + height) return (row + 1) * rowHeight - height;
  return top;
}

/** On a narrow screen the first cell of a row may have several lines. */
function readRowHeight(numLines = 2): number {
  const size = Number.parseFloat(getComputedStyle(document.documentElement).fontSize) || 14;
  const narrow = NARROW_ROW_REM + LINE_REM * (numLines - 2);
  return Math.round((isNarrow.value ? Math.max(narrow, ROW_REM) : ROW_REM) * size);
}

/** The most rows that an element can have: browsers limit its height to about 2^25 pixels. */
export function findMaxRows(): number {
  return Math.floor(33_000_000 / readRowHeight(MAX_LINES));
}

/**
 * Tracks the scroll position of the element with `ref`, and returns its visible rows. Their first
 * cells have up to `numLines` lines on a narrow screen.
 */
export function useVirtualRows(numRows: number, numLines = 2) {
  const ref = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 600, rowHeight: readRowHeight(numLines) });
  useLayoutEffect(() => {
    const scroller = ref.current;
    if (!scroller) return;
    const read = (): void => {
      const next = {
        top: scroller.scrollTop,
        height: scroller.clientHeight,
        rowHeight: readRowHeight(numLines),
      };
      // Small movements within the drawn rows need no update.
      setView((previous) => (hasSameRows(previous, next) ? previous : next));
    };
    read();
    scroller.addEventListener("scroll", read, { passive: true });
    const observer = new ResizeObserver(read);
    observer.observe(scroller);
    return () => {
      scroller.removeEventListener("scroll", read);
      observer.disconnect();
    };
  }, [numLines]);
  const { rowHeight } = view;
  const scrollToRow = (row: number): void => {
    const scroller = ref.current;
    if (!scroller) return;
    // The header covers one row's height.
    const height = scroller.clientHeight - rowHeight;
    scroller.scrollTop = scrollTopToShow(row, scroller.scrollTop, height, rowHeight);
  };
  /** Scrolls a row that was selected elsewhere near the top, since the bottom may be off screen. */
  const revealRow = (row: number): void => {
    const scroller = ref.current;
    if (!scroller) return;
    const isVisible =
      row >= view.top / rowHeight && (row + 1) * rowHeight < view.top + view.height / 2;
    if (!isVisible) scroller.scrollTop = Math.max(row - ROWS_ABOVE, 0) * rowHeight;
  };
  return {
    ref,
    rowHeight,
    scrollToRow,
    revealRow,
    ...findVisibleRows(view.top, view.height, rowHeight, numRows),
  };
}

interface View {
  readonly top: number;
  readonly height: number;
  readonly rowHeight: number;
}

function hasSameRows(a: View, b: View): boolean {
  const isClose = Math.floor(a.top / a.rowHeight / 4) === Math.floor(b.top / b.rowHeight / 4);
  return isClose && a.height === b.height && a.rowHeight === b.rowHeight;
}
