/** Only the rows that are in sight are drawn, however many there are. */
import { useLayoutEffect, useRef, useState } from "preact/hooks";

const ROW_REM = 2.125;
const OVERSCAN = 8;
const ROWS_ABOVE = 3; // one that was looked for, so that its neighbours show

export interface Window {
  readonly first: number;
  readonly end: number; // position after the last one
}

export function windowOf(top: number, height: number, rowHeight: number, numRows: number): Window {
  const first = Math.max(Math.floor(top / rowHeight) - OVERSCAN, 0);
  const end = Math.min(Math.ceil((top + height) / rowHeight) + OVERSCAN, numRows);
  return { first: Math.min(first, Math.max(end, 0)), end };
}

/** The scroll offset that brings a row into sight with the least movement. */
export function scrollTo(row: number, top: number, height: number, rowHeight: number): number {
  if (row * rowHeight < top) return row * rowHeight;
  if ((row + 1) * rowHeight > top + height) return (row + 1) * rowHeight - height;
  return top;
}

function readRowHeight(): number {
  const size = Number.parseFloat(getComputedStyle(document.documentElement).fontSize) || 14;
  return Math.round(ROW_REM * size);
}

/** Follows a scroller; put `ref` on it, and `head` pixels of it are a header that stays. */
export function useWindow(numRows: number) {
  const ref = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 600, rowHeight: readRowHeight() });
  useLayoutEffect(() => {
    const scroller = ref.current;
    if (!scroller) return;
    const read = (): void => {
      const next = {
        top: scroller.scrollTop,
        height: scroller.clientHeight,
        rowHeight: readRowHeight(),
      };
      // Small movements within the rows that are drawn already need nothing new.
      setView((now) => (isSameWindow(now, next) ? now : next));
    };
    read();
    scroller.addEventListener("scroll", read, { passive: true });
    const observer = new ResizeObserver(read);
    observer.observe(scroller);
    return () => {
      scroller.removeEventListener("scroll", read);
      observer.disconnect();
    };
  }, []);
  const { rowHeight } = view;
  const bring = (row: number): void => {
    const scroller = ref.current;
    if (!scroller) return;
    // The header covers one row's height.
    const height = scroller.clientHeight - rowHeight;
    scroller.scrollTop = scrollTo(row, scroller.scrollTop, height, rowHeight);
  };
  /** For a row that was selected elsewhere: to the top, since the page may cut the scroller off. */
  const present = (row: number): void => {
    const scroller = ref.current;
    if (!scroller) return;
    const isInSight =
      row >= view.top / rowHeight && (row + 1) * rowHeight < view.top + view.height / 2;
    if (!isInSight) scroller.scrollTop = Math.max(row - ROWS_ABOVE, 0) * rowHeight;
  };
  return { ref, rowHeight, bring, present, ...windowOf(view.top, view.height, rowHeight, numRows) };
}

interface View {
  readonly top: number;
  readonly height: number;
  readonly rowHeight: number;
}

function isSameWindow(a: View, b: View): boolean {
  const isNear = Math.floor(a.top / a.rowHeight / 4) === Math.floor(b.top / b.rowHeight / 4);
  return isNear && a.height === b.height && a.rowHeight === b.rowHeight;
}
