import { expect, test } from "vitest";
import {
  countOf,
  formatBytes,
  formatCount,
  formatDuration,
  formatFlops,
  formatShare,
} from "./units";
import cases from "./units.cases.json";

const FORMS = {
  bytes: formatBytes,
  count: formatCount,
  duration: formatDuration,
  flops: formatFlops,
};

test.each(Object.keys(FORMS) as (keyof typeof FORMS)[])("%s read as Python writes them", (name) => {
  const written = Object.keys(cases[name]).map((number) => [number, FORMS[name](Number(number))]);
  expect(Object.fromEntries(written)).toEqual(cases[name]);
});

test("shares of nothing are nothing, and small ones do not read as none", () => {
  expect([formatShare(0, 0), formatShare(1, 1000), formatShare(1, 3)]).toEqual([
    "0%",
    "<1%",
    "33%",
  ]);
});

test("one thing is not many", () => {
  expect([countOf(1, "rank"), countOf(1024, "rank"), countOf(2, "match", "matches")]).toEqual([
    "1 rank",
    "1,024 ranks",
    "2 matches",
  ]);
});
