// @vitest-environment happy-dom
import { expect, test } from "vitest";
import type { Figure } from "../page";
import { formatChangeShare, listDifferences, readEarlier } from "./earlier";
import cases from "./figures.cases.json";
import { listRecordingFigures, type RecordedRun } from "./recording_figures";

function figure(label: string, value: number, group = "g"): Figure {
  return { view: "memory", group, label, unit: "bytes", value };
}

test("figures are joined by name, and what only one side has is not zero", () => {
  const before = [figure("a", 2), figure("gone", 5)];
  const after = [figure("a", 3), figure("new", 7), figure("x", 1, "only on the page")];
  expect(listDifferences("memory", before, after)).toEqual([
    { group: "g", label: "a", unit: "bytes", before: 2, after: 3 },
    { group: "g", label: "new", unit: "bytes", before: null, after: 7 },
    { group: "g", label: "gone", unit: "bytes", before: 5, after: null },
  ]);
});

test.each([
  [200, 224, "+12%"],
  [200, 100, "−50%"],
  [1000, 1001, "+<1%"],
  [1, 5000, "+>999%"],
  [0, 5, ""],
  [5, 5, ""],
])("from %d to %d is %s", (before, after, text) => {
  expect(formatChangeShare({ group: "", label: "", unit: "count", before, after })).toBe(text);
});

test("figures of a recording are those that Python computes for its page", () => {
  for (const { recording, figures } of cases as unknown as readonly {
    recording: RecordedRun;
    figures: readonly Figure[];
  }[]) {
    const key = ({ view, group, label }: Figure): string => `${view}\n${group}\n${label}`;
    const expected = new Map(figures.map((item) => [key(item), item.value]));
    const actual = listRecordingFigures(recording);
    expect(actual.length).toBeGreaterThan(4);
    for (const item of actual)
      expect([key(item), item.value]).toEqual([key(item), expected.get(key(item))]);
  }
});

test.each([
  ["run.parquet", "PAR1\u0000", "is in Parquet, which this page cannot read. Write a page of both"],
  ["notes.txt", "hello", "is neither a report nor a recording of shardscope"],
  ["data.json", '{"format": "x"}', "is no recording of shardscope"],
  ["run.jsonl", '{"format":"shardscope.stream","schema":2}\n{}\n', "is a stream. Join its ranks"],
  ["page.html", "<!doctype html><p>hi", "is HTML, but no report of shardscope"],
  ["old.html", '<script id="page">{"schema":1}</script>', "another version of shardscope"],
])("a wrong file is refused in a sentence: %s", async (name, content, message) => {
  await expect(readEarlier(new File([content], name))).rejects.toThrow(message);
});
