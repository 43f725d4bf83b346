// @vitest-environment happy-dom
import { afterEach, expect, test } from "vitest";
import { arrangeColumns, countLines, listTracks, wrapText } from "./column_layout";
import { isNarrow } from "./narrow";
import type { Column } from "./table";

afterEach(() => {
  isNarrow.value = false;
});

const COLUMNS: readonly Column[] = [
  { id: "name", title: "Name", width: 20, value: () => "layers.0.attention.wq.weight" },
  { id: "detail", title: "Detail", width: 14, value: () => "" },
  { id: "bar", title: "Sent", width: 11, align: "end", value: () => 1 },
  { id: "work", title: "Work", width: 7.5, align: "end", value: () => 1 },
];

test("on a narrow screen figures follow the first column and keep the width of their digits", () => {
  expect(arrangeColumns(COLUMNS, 1)).toEqual(COLUMNS);
  isNarrow.value = true;
  const narrow = arrangeColumns(COLUMNS, 1);
  expect(narrow.map(({ id, width }) => [id, width])).toEqual([
    ["name", 12.2], // what two whole figures leave of the screen
    ["bar", 5.5], // its bar is left out
    ["work", 7.5],
    ["detail", 14],
  ]);
  const verdict: Column = { id: "v", title: "", width: 10, narrowPlace: 1, value: () => "" };
  const judged = arrangeColumns([...COLUMNS, verdict], 1);
  expect(judged.slice(0, 3).map(({ id, width }) => [id, width])).toEqual([
    ["name", 9.5],
    ["v", 9.5],
    ["bar", 5.5],
  ]);
});

test("rows are as high as the lines of their first cells", () => {
  expect(countLines(COLUMNS[0], 1)).toBe(1);
  isNarrow.value = true;
  const [name] = arrangeColumns(COLUMNS, 1);
  expect(countLines(name, 1)).toBe(2);
  expect(countLines(name, 1, 1)).toBe(1);
  expect(wrapText("redistribution Partial(sum) → Replicate for Rowwise", 16)).toBe(4);
  expect(wrapText("x".repeat(40), 16)).toBe(3);
  expect(wrapText("layers.0.attention.wq.weight", 16)).toBe(3); // broken after dots
  expect(wrapText("", 16)).toBe(1);
});

test("on a wide screen growing columns are no wider than what they show", () => {
  const name: Column = { id: "n", title: "", width: 5, grow: 3, value: () => "x".repeat(20) };
  const bar: Column = { id: "b", title: "", width: 10, grow: 1, align: "end", value: () => 1 };
  const why: Column = { id: "w", title: "", width: 8, value: () => "" };
  expect(listTracks([name, bar, why], 1)).toBe(
    "minmax(5rem, 17.28rem) minmax(10rem, 20rem) 8rem minmax(0, 1fr)",
  );
});
