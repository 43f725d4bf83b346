// @vitest-environment happy-dom
import { beforeEach, expect, test } from "vitest";
import { makePage } from "../store/empty_page";
import { page } from "../store/page";
import { formatRoute, parseRoute } from "../store/route";
import { listUnknownParts, removeUnknown } from "./unknown_parts";

beforeEach(() => {
  page.value = makePage({
    run: { world_size: 8, title: "Net" },
    modules: { path: ["", "layers", "layers.0"] },
    sources: { file: ["net.py"], line: [3], function: ["forward"], text: [""] },
    communication: {
      axes: ["dp", "tp"],
      kinds: ["all_reduce"],
      phases: ["forward", "backward"],
      causes: [],
      dtypes: ["float32"],
      calls: { rank: [0] },
      ranks: [],
      num_steps: 2,
      traffic: { count: [1], wire_bytes: [1] },
    },
  });
});

function describe(address: string): string[] {
  return listUnknownParts(parseRoute(address)).map(
    ({ label, value, reason }) => `${label} ${value}: ${reason}`,
  );
}

test.each([
  "",
  "#/communication?axis=dp&kind=all_reduce&phase=forward&dtype=float32&rank=7&range=0-9ns",
  "#/modules?m=layers.*&line=net.py%3A3&theme=dark&tree=closed.1.x2&q=a+b&by=wire&color=axis",
  "#/communication?lanes=module&height=log&view=0_12.5&sort.causes=-wire&differences=all",
  "#/memory?m=layers&at=-3&from=9&by=line",
])("an address of this page has no unknown parts: %s", (address) => {
  expect(describe(address)).toEqual([]);
});

test.each([
  ["#/communication?axis=pp", "axis pp: there are dp and tp"],
  ["#/overview?kind=send", "kind send: there is all_reduce"],
  ["#/overview?phase=x", "phase x: there are forward and backward"],
  ["#/overview?m=layers.9", "module layers.9: no module has this name"],
  ["#/overview?m=blocks.*", "module blocks.*: no module's name matches"],
  ["#/overview?line=net.py%3A4", "line net.py:4: no line of this recording"],
  ["#/overview?rank=8", "rank 8: ranks are 0 to 7"],
  ["#/overview?rank=x", "rank x: a rank is a number"],
  ["#/overview?step=3", "step 3: steps are 1 to 2"],
  ["#/overview?step=-1", "step -1: a step is a number"],
  ["#/overview?range=9-3", "range 9-3: a range is FIRST-LAST or FIRST-LASTns"],
  ["#/overview?cause=x", "cause x: this page has none"],
  ["#/modules?by=size", "by size: there are wire and count"],
  ["#/modules?axes=dp", "axes dp: the view has no such choice"],
  ["#/memory?at=peak", "at peak: it is not understood"],
  ["#/overview?theme=blue", "theme blue: there are light and dark"],
])("an unknown part is named with what there is: %s", (address, words) => {
  expect(describe(address)).toEqual([words]);
});

test("clearing unknown parts keeps the others", () => {
  const address = parseRoute("#/comunication?axis=dp&rank=99&module=x&m=layers");
  const unknown = listUnknownParts(address);
  expect(unknown.map(({ param }) => param)).toEqual(["", "rank", "module"]);
  expect(formatRoute(removeUnknown(address, unknown))).toBe("#/overview?axis=dp&m=layers");
});

test("without collectives, a page knows no axis", () => {
  page.value = { ...page.value, communication: null };
  expect(describe("#/overview?axis=dp&range=0-9")).toEqual([
    "axis dp: this page has none",
    "range 0-9: this page has no collectives",
  ]);
});

test("names of other views are known, too: a page may have no collectives", () => {
  const tensors = { phase: ["optimizer", ""], dtype: ["int8", ""], step: [1, 3] };
  page.value = makePage({
    run: { world_size: 8, title: "Net", mesh: [{ name: "dp", size: 8 }] },
    sharding: { drawings: [{ axes: ["ep"] }], parameters: { dtype: ["bfloat16"] } },
    proof: {
      parity: [{ tensors, divergences: [{ phase: "recompute" }] }],
      parallel: [
        {
          tensors: { phase: [], dtype: [], step: [] },
          inserted: [{ axis: "tp", kind: "all_reduce", phase: "forward" }],
          fallbacks: [{ axis: "cp" }],
        },
      ],
    },
  });
  for (const [facet, names] of Object.entries({
    axis: ["dp", "ep", "tp", "cp"],
    kind: ["all_reduce"],
    phase: ["optimizer", "forward", "recompute"],
    dtype: ["bfloat16", "int8"],
    step: ["1", "2", "3"],
  })) {
    for (const name of names) expect(describe(`#/overview?${facet}=${name}`)).toEqual([]);
  }
  expect(describe("#/proof?axis=zz")).toEqual(["axis zz: there are dp, ep, tp and cp"]);
  expect(describe("#/proof?step=4")).toEqual(["step 4: steps are 1 to 3"]);
});
