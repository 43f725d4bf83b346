// @vitest-environment happy-dom
import { expect, test } from "vitest";
import type { Figure } from "../page";
import { listMemoryFigures, listTrafficFigures } from "./compared_figures";
import { formatChangeShare, isSame, listDifferences } from "./differences";
import { makePage } from "./empty_page";
import { makeFigure } from "./figure_parts";
import cases from "./figures.cases.json";
import { page } from "./page";
import { readEarlier } from "./read_earlier";
import { listRecordedFigures } from "./recorded_figures";
import { RECORDING_SCHEMA, type RecordedRun, readRecordedData } from "./recorded_run";

page.value = makePage({});

function figure(label: string, value: number, group = "g"): Figure {
  return makeFigure("memory", group, label, "bytes", value);
}

test("figures are joined by name, and what only one side has is not zero", () => {
  const before = [figure("a", 2), figure("gone", 5)];
  const after = [figure("a", 3), figure("new", 7), figure("x", 1, "only on the page")];
  const rows = listDifferences(before, after);
  expect(rows).toEqual([
    { group: "g", label: "a", unit: "bytes", before: 2, after: 3 },
    { group: "g", label: "new", unit: "bytes", before: null, after: 7 },
    { group: "g", label: "gone", unit: "bytes", before: 5, after: null },
  ]);
  expect(rows.map(isSame)).toEqual([false, false, false]);
  const divided = listDifferences(before, [figure("odd", 1, "g by rule"), ...after]);
  expect(divided[0]).toMatchObject({ group: "g by rule", label: "odd", before: null, after: 1 });
  expect(isSame({ ...rows[0]!, before: null, after: 0 })).toBe(true);
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

const RECORDINGS = cases as unknown as readonly {
  recording: RecordedRun;
  figures: readonly Figure[];
}[];

/** Figures that take more than counting, so that the browser does not compare them. */
const ONLY_OF_PYTHON = /^bytes of parameters$/;

test.each(RECORDINGS)(
  "figures of a recording are those that Python computes for its page",
  ({ recording, figures }) => {
    expect(recording.schema).toBe(RECORDING_SCHEMA);
    const { communication, memory } = readRecordedData(recording);
    const actual = [
      ...listRecordedFigures(recording),
      ...(communication ? listTrafficFigures(communication, () => true) : []),
      ...(memory[0] ? listMemoryFigures(memory[0], true, () => true) : []),
    ];
    const sort = (items: readonly Figure[]): string[] =>
      items.map(({ view, group, label, value }) => [view, group, label, value].join("; ")).sort();
    const compared = figures.filter(
      ({ group, value, view }) => !ONLY_OF_PYTHON.test(group) && !(view === "memory" && !value),
    );
    expect(sort(actual)).toEqual(sort(compared));
  },
);

test.each([
  ["run.parquet", "PAR1\u0000", "is in Parquet, which this page cannot read. Write a page of both"],
  ["notes.txt", "hello", "is neither a report nor a recording of shardscope"],
  ["data.json", '{"format": "x"}', "is no recording of shardscope"],
  ["run.jsonl", '{"format":"shardscope.stream","schema":2}\n{}\n', "is a stream. Join its ranks"],
  ["page.html", "<!doctype html><p>hi", "is HTML, but no report of shardscope"],
  ["old.html", '<script id="page">{"schema":1}</script>', "another version of shardscope"],
  [
    "old one.json",
    '{"format":"shardscope.recording","schema":1}',
    "(schema 1). Save it again: shardscope merge 'old one.json' -o before.json.gz",
  ],
])("a wrong file is refused in a sentence: %s", async (name, content, message) => {
  await expect(readEarlier(new File([content], name))).rejects.toThrow(message);
});

test("what is not compared of a recording is named, with the command that compares it", async () => {
  page.value = makePage({ run: { world_size: 1, file: "after.json.gz" } });
  const text = '{"format":"shardscope.recording","schema":2}';
  const earlier = await readEarlier(new File([text], "before.json"));
  expect(earlier.command).toBe("shardscope report after.json.gz --against before.json");
  expect(Object.keys(earlier.omitted)).toContain("compiler");
});
