import { beforeEach, expect, test } from "vitest";
import { listCauses } from "../views/communication/cause_rows";
import { makePage } from "./empty_page";
import { moduleTraffic, ownCollectives } from "./module_traffic";
import { modulePattern } from "./modules";
import { page } from "./page";
import { navigate } from "./route";
import {
  clear,
  formatLocation,
  select,
  selectedFacets,
  selection,
  selectionHref,
} from "./selection";
import {
  busiestRank,
  hasAllCalls,
  NO_TRAFFIC,
  selectedTraffic,
  sumRows,
  type TrafficSum,
} from "./traffic";
import cases from "./traffic.cases.json";

const EXPECTATIONS = cases.flatMap((recording) =>
  recording.expected.map((expected) => ({
    name: `${recording.name} with ${JSON.stringify(expected.params)}`,
    recording,
    expected,
  })),
);

function open(recording: { readonly page: unknown }, params: Record<string, string | undefined>) {
  page.value = makePage(recording.page as Parameters<typeof makePage>[0]);
  navigate({ view: "communication", params: params as Record<string, string> });
}

const figures = ({ count, input_bytes, wire_bytes }: TrafficSum) => [
  count,
  input_bytes,
  wire_bytes,
];

test("the busiest rank sends most, then has most collectives, then comes first", () => {
  const pick = (bytes: readonly number[], counts: readonly number[]): number => {
    const ranks = bytes.map((_, at) => ({ ranks: `${4 * at}-${4 * at + 3}`, example: 4 * at }));
    const traffic = { rank_set: [...ranks.keys()], wire_bytes: bytes, count: counts };
    page.value = makePage({
      communication: { ranks, traffic: { ...traffic, input_bytes: bytes } },
    });
    return busiestRank.value;
  };
  expect(pick([5, 9, 9], [3, 1, 2])).toBe(8);
  expect(pick([9, 9, 5], [2, 2, 7])).toBe(0);
  expect(pick([], [])).toBe(-1);
});

test.each(EXPECTATIONS)("sums are those of Python: $name", ({ recording, expected }) => {
  open(recording, expected.params);
  const { axes, kinds, phases, causes, ranks } = page.value.communication!;
  expect(figures(selectedTraffic.value)).toEqual(expected.total);
  const byRankSet = new Map(sumRows(["rank_set"]).map((sum) => [sum.values[0], sum]));
  expect(ranks.map((_, i) => figures(byRankSet.get(i) ?? NO_TRAFFIC))).toEqual(expected.ranks);
  const facets = sumRows(["axis", "kind", "phase"]).map(({ values: [axis, kind, phase], ...sum }) =>
    JSON.stringify([axes[axis!], kinds[kind!], phases[phase!], ...figures(sum)]),
  );
  expect(facets.sort()).toEqual(expected.facets.map((facet) => JSON.stringify(facet)).sort());
  const byCause = sumRows(["cause", "kind", "axis"]).map(
    ({ values: [cause, kind, axis], ...sum }) =>
      JSON.stringify([causes[cause!], `${kinds[kind!]}[${axes[axis!]}]`, ...figures(sum)]),
  );
  expect(byCause.sort()).toEqual(expected.causes.map((cause) => JSON.stringify(cause)).sort());
});

test.each(EXPECTATIONS.filter(({ expected }) => !("m" in expected.params)))(
  "figures of modules are those of Python: $name",
  ({ recording, expected }) => {
    open(recording, expected.params);
    const actual = moduleTraffic.value.flatMap((traffic, i) =>
      traffic.count
        ? [[page.value.modules.path[i], { ...toCase(traffic), what: ownCollectives.value[i] }]]
        : [],
    );
    expect(Object.fromEntries(actual)).toEqual(expected.modules);
  },
);

function toCase(traffic: (typeof moduleTraffic.value)[number]) {
  return {
    total: figures(traffic),
    phase_counts: traffic.phaseCounts,
    phase_bytes: traffic.phaseBytes,
    own_counts: traffic.ownCounts,
    own_bytes: traffic.ownBytes,
    is_uneven: traffic.isUneven,
  };
}

test.each(cases)("causes are listed in Python's order: $name", (recording) => {
  open(recording, {});
  const { causes } = page.value.communication!;
  const rows = listCauses(page.value.communication!);
  expect(rows.map((row) => [causes[row.cause], row.what, ...figures(row)])).toEqual(
    recording.expected[0]!.causes,
  );
  expect(hasAllCalls.value).toBe(true);
});

beforeEach(() => open(cases[0]!, {}));

test("the selection is read from the address, and unknown names select everything", () => {
  open(cases[0]!, {
    axis: "zz",
    rank: "x",
    range: "9-3",
    m: "no.such.module",
    line: "no.py:1",
    dtype: "",
  });
  expect(selectedFacets.value).toEqual([]);
  open(cases[0]!, { rank: "4096", m: "no.such.*" });
  expect(selectedFacets.value).toEqual([]);
  const line = formatLocation(0);
  open(cases[0]!, { rank: "5", range: "3-9ns", line, m: "layers.*" });
  expect(selectedFacets.value).toEqual(["module", "line", "rank", "range"]);
  expect(selection.value.range).toEqual({ along: "time", low: 3, high: 9 });
  expect(modulePattern.value).toBe("layers.*");
});

test("a value is selected and cleared in the address", () => {
  const [axis] = page.value.communication!.axes;
  select("axis", axis!);
  expect(selectionHref({ rank: "1" }, "memory")).toBe(`#/memory?axis=${axis}&rank=1`);
  select("rank", "1023");
  expect(selectedTraffic.value).toEqual(NO_TRAFFIC);
  clear("rank", "axis");
  expect(selectedFacets.value).toEqual([]);
});
