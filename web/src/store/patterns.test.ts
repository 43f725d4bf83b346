import { expect, test } from "vitest";
import cases from "./names.cases.json";
import { isPattern, matchesInside, matchesName } from "./patterns";
import { includesRank } from "./ranks";

test.each(Object.entries(cases.patterns))(
  "%s matches the names that it does in Python",
  (pattern, expected) => {
    expect(isPattern(pattern)).toBe(expected.is_pattern);
    expect(cases.names.filter((name) => matchesName(pattern, name))).toEqual(expected.names);
    expect(cases.names.filter((name) => matchesInside(pattern, name))).toEqual(expected.inside);
  },
);

test.each(Object.entries(cases.ranks))(
  "%s includes the ranks that Python formatted",
  (text, ranks) => {
    const upTo = Array.from({ length: 120 }, (_, rank) => rank);
    expect(upTo.filter((rank) => includesRank(text, rank))).toEqual(ranks);
    expect(upTo.filter((rank) => includesRank(`ranks ${text}`, rank))).toEqual(ranks);
  },
);
