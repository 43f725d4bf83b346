import { expect, test } from "vitest";
import {
  formatBytes,
  formatCount,
  formatDuration,
  formatFlops,
  formatShare,
  pluralize,
} from "./units";
import cases from "./units.cases.json";

const FORMATTERS = {
  bytes: formatBytes,
  count: formatCount,
  duration: formatDuration,
  flops: formatFlops,
};

test.each(Object.keys(FORMATTERS) as (keyof typeof FORMATTERS)[])(
  "%s are formatted as in Python",
  (name) => {
    const written = Object.keys(cases[name]).map((number) => [
      number,
      FORMATTERS[name](Number(number)),
    ]);
    expect(Object.fromEntries(written)).toEqual(cases[name]);
  },
);

test("shares of zero are 0%, and small shares are not", () => {
  expect([formatShare(0, 0), formatShare(1, 1000), formatShare(1, 3)]).toEqual([
    "0%",
    "<1%",
    "33%",
  ]);
});

test("nouns are plural unless there is exactly one", () => {
  expect([pluralize(1, "rank"), pluralize(1024, "rank"), pluralize(2, "match", "matches")]).toEqual(
    ["1 rank", "1,024 ranks", "2 matches"],
  );
});
