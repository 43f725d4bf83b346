// @vitest-environment happy-dom
import { expect, test } from "vitest";
import type { Column } from "../parts/table";
import { toName } from "./download";
import { escapeMarkdown, tableToCsv, tableToMarkdown } from "./tables";

const NAMES = ["layers.0", '=HYPERLINK("x")', "a,b|c\nd"];
const COLUMNS: readonly Column[] = [
  { id: "name", title: "Name", width: 1, value: (row) => NAMES[row]! },
  {
    id: "bytes",
    title: "Bytes",
    width: 1,
    align: "end",
    value: (row) => (row === 2 ? null : 1024 * row),
    cell: (row) => <b>{row} KiB</b>,
  },
  { id: "status", title: "", width: 1, value: () => 3, exported: () => "after" },
];

test("a CSV file has values without units, and no cell that a spreadsheet would run", () => {
  expect(tableToCsv({ label: "t", columns: COLUMNS, rows: [1, 0, 2] })).toBe(
    'Name,Bytes,status\n"\'=HYPERLINK(""x"")",1024,after\nlayers.0,0,after\n"a,b|c\nd",,after\n',
  );
});

test("Markdown has cells as they are displayed, on one line, with marks escaped", () => {
  const rows = Array.from({ length: 201 }, () => 2);
  const lines = tableToMarkdown({ label: "t", columns: COLUMNS, rows }).split("\n");
  expect(lines.slice(0, 3)).toEqual([
    "| Name | Bytes | status |",
    "| --- | --: | --- |",
    "| a,b\\|c d | 2 KiB | 3 |",
  ]);
  expect(lines.at(-1)).toBe("… and 1 more rows; the CSV has all of them.");
  expect(escapeMarkdown("[x](javascript:y) <img>")).toBe("\\[x\\](javascript:y) \\<img\\>");
});

test("names of files have no separators or control characters", () => {
  expect(toName("Llama on dp=8 × tp=4")).toBe("Llama-on-dp-8-tp-4");
  expect(toName("../../etc/passwd\u0000\u202e")).toBe("etc-passwd");
});
