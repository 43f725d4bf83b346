import { expect, test } from "vitest";
import type { Communication, Modules, Page, Traffic } from "../../page";
import { clipText } from "../../parts/canvas";
import { facetSeries } from "../../parts/colors";
import { makePage } from "../../store/empty_page";
import { findRepresentatives } from "../../store/modules";
import { page } from "../../store/page";
import { parseRoute, route } from "../../store/route";
import { findSpread, formatEach, nameRepresented, patternOf, sumShown } from "./folded_sums";
import {
  FULL,
  findBoxAt,
  findNode,
  findViewport,
  type IcicleNode,
  layoutIcicle,
  listBoxes,
  moveByKey,
} from "./icicle_layout";
import {
  formatChange,
  formatTotalShare,
  listColors,
  makeIcicleModel,
  styleBox,
  sumMatches,
  sumNames,
} from "./icicle_model";
import { MEASURES } from "./measures";
import { splitTraffic } from "./traffic_parts";

// root ─ head, layers ─ 0 ─ a, b │ 1 ─ a, b │ 2 ─ a, b
const paths = [
  "",
  "head",
  "layers",
  ...[0, 1, 2].flatMap((i) => [`layers.${i}`, `layers.${i}.a`, `layers.${i}.b`]),
];
const SIZES = [100, 10, 90, 30, 20, 6, 30, 20, 6, 30, 20, 6];
const [WIRE, , PARAMETERS] = MEASURES;
const modules = {
  recorded: ["wire", "parameters"],
  path: paths,
  label: paths.map((path) => path.split(".").at(-1)!),
  type: paths.map(() => "Module"),
  parent: [-1, 0, 0, 2, 3, 3, 2, 6, 6, 2, 9, 9],
  end: [12, 2, 12, 6, 5, 6, 9, 8, 9, 12, 11, 12],
  first_identical: [0, 1, 2, 3, 4, 5, 3, 7, 8, 3, 10, 11],
  repeat: [1, 1, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1],
  total_parameters: SIZES,
  own_peak: { kinds: [], module: [], kind: [], num_bytes: [] },
  earlier: null,
} as unknown as Modules;
const FOLDED = findRepresentatives(modules);
const UNFOLDED = findRepresentatives(modules, new Set([3]));

function layout(shown: Int32Array, sizes: ArrayLike<number> = sumShown(SIZES, shown)) {
  return layoutIcicle({ modules, shown, sizes });
}

function node(roots: readonly IcicleNode[], id: number): IcicleNode {
  return findNode(roots, String(id))!;
}

test("a folded layer has the sum and the width of all layers that it represents", () => {
  const roots = layout(FOLDED);
  expect(node(roots, 3)).toMatchObject({ left: 0.1, width: 0.9, size: 90, own: 12, depth: 2 });
  expect(node(roots, 4).width).toBeCloseTo(0.6);
  expect(findNode(roots, "6")).toBeNull();
  const unequal = [...SIZES.slice(0, 10), 26, 6];
  const sums = sumShown(unequal, FOLDED);
  expect([sums[4], sums[7], sums[10]]).toEqual([66, 20, 26]); // a search shows single layers, too
  const spread = findSpread((i) => unequal[i]!, FOLDED, 4);
  expect([spread, formatEach(spread, String)]).toEqual([{ low: 20, high: 26 }, "20 – 26 each"]);
  expect(formatEach({ low: 5, high: 5 }, String)).toBe("5 each");
  expect(nameRepresented(modules, FOLDED, 4)).toBe("layers.{0…2}.a");
  expect(patternOf(modules, FOLDED, 3)).toBe("layers.[0-2]");
});

test("unfolded layers are side by side", () => {
  const roots = layout(UNFOLDED);
  expect([3, 6, 9].map((id) => node(roots, id).width)).toEqual([0.3, 0.3, 0.3]);
});

test("children that add up to more than their parent widen it", () => {
  const roots = layout(UNFOLDED, [50, ...SIZES.slice(1)]);
  expect(roots[0]).toMatchObject({ size: 50, width: 1, own: 0 });
  expect(node(roots, 2).left + node(roots, 2).width).toBeCloseTo(1);
});

test("a zoomed module has the full width below its ancestors, and the rest is not drawn", () => {
  const roots = layout(FOLDED);
  const boxes = listBoxes(roots, findViewport(node(roots, 3)), 900, 9);
  const drawn = boxes.map((box) => [box.node!.module, box.x, Math.round(box.width)]);
  expect(drawn).toEqual([
    [0, 0, 900],
    [2, 0, 900],
    [3, 0, 900],
    [4, 0, 600],
    [5, 600, 180],
  ]);
  expect(listBoxes(roots, FULL, 900, 2).map((box) => box.node!.module)).toEqual([0, 1, 2]);
  expect(findViewport(null)).toBe(FULL);
});

test("boxes that are too narrow are merged, so that there are never more than pixels", () => {
  const parent = [-1, ...Array.from({ length: 5000 }, () => 0)];
  const flat = { parent, end: parent.map((_, i) => (i ? i + 1 : parent.length)) };
  const shown = Int32Array.from(parent, (_, i) => i);
  const sizes = parent.map((_, i) => (i === 0 ? 5500 : i === 2500 ? 501 : 1));
  const boxes = listBoxes(layoutIcicle({ modules: flat, shown, sizes }), FULL, 1000, 9);
  expect(boxes.map((box) => [box.numMerged, Math.round(box.width)])).toEqual([
    [1, 1000],
    [2499, 454],
    [1, 91],
    [2500, 455],
  ]);
});

test("arrow keys move to neighbours, the parent and the largest child", () => {
  const roots = layout(FOLDED);
  const boxes = listBoxes(roots, FULL, 900, 9);
  let active: IcicleNode | null = null;
  const visited = [
    "ArrowDown",
    "ArrowDown",
    "ArrowLeft",
    "ArrowRight",
    "ArrowDown",
    "ArrowDown",
  ].map((key) => {
    active = moveByKey(boxes, active, key) ?? active;
    return active!.module;
  });
  expect(visited).toEqual([0, 2, 1, 2, 3, 4]);
  expect(moveByKey(boxes, active, "ArrowUp")!.module).toBe(3);
  expect(moveByKey(boxes, active, "ArrowDown")).toBeNull();
  expect(moveByKey(boxes, active, "Home")!.module).toBe(0);
  expect(findBoxAt(boxes, 200, 3)!.node!.module).toBe(4);
  expect(findBoxAt(boxes, 20, 3)).toBeNull();
});

// Rank 0 gathers 8 for layer 0 and sends 2 for head; rank 1 sends 5 for layer 1.
const TRAFFIC = {
  rank_set: [0, 0, 1],
  owner: [4, 1, 7],
  axis: [0, 1, 1],
  kind: [0, 1, 1],
  phase: [0, 1, 1],
  cause: [0, 0, 0],
  source: [-1, -1, -1],
  dtype: [0, 0, 0],
  step: [] as number[],
  count: [1, 1, 1],
  input_bytes: [8, 2, 5],
  wire_bytes: [8, 2, 5],
} as Traffic;

test("each module has the figures of its busiest rank, in parts that add up", () => {
  const request = { figure: "wire_bytes", facet: "axis", numParts: 2 } as const;
  const { totals, parts } = splitTraffic(modules, TRAFFIC, { ...request, isIncluded: () => true });
  expect([0, 1, 2, 3, 6].map((i) => totals[i])).toEqual([10, 2, 8, 8, 5]);
  expect([0, 1, 2].map((i) => [parts[0]![i], parts[1]![i]])).toEqual([
    [8, 2],
    [0, 2],
    [8, 0],
  ]);
  const isIncluded = (row: number): boolean => TRAFFIC.axis[row] === 1;
  const filtered = splitTraffic(modules, TRAFFIC, { ...request, isIncluded });
  expect([0, 1, 2].map((i) => filtered.totals[i])).toEqual([5, 2, 5]);
});

const COMMUNICATION = {
  axes: ["dp", ""],
  kinds: ["all_gather", "send"],
  phases: ["forward", "backward"],
  causes: ["call"],
  dtypes: ["float32"],
  ranks: [
    { ranks: "0", example: 0, num_ranks: 1 },
    { ranks: "1", example: 1, num_ranks: 1 },
  ],
  traffic: TRAFFIC,
} as unknown as Communication;
const PAGE = makePage({ modules, communication: COMMUNICATION });

test("a selection narrows sizes, and the legend has all names with the colours of their kind", () => {
  page.value = PAGE;
  const facts = { page: PAGE, measure: WIRE!, shown: FOLDED };
  const model = makeIcicleModel({ ...facts, color: "kind" });
  expect(sumNames(model)).toEqual([
    { name: "all_gather", series: 1, size: 8 },
    { name: "send", series: 4, size: 5 },
  ]);
  expect(model.total).toBe(10);
  // Rank 1 sends for another layer: figures are of one rank, shares of what both send.
  expect([...model.weights.slice(0, 3), model.weights[6]]).toEqual([15, 2, 13, 5]);
  expect(formatTotalShare(model, findNode(model.roots, "1")!)).toBe("13%");
  expect(sumMatches(modules, model.weights, ["layers"])).toMatchObject({ size: 13, total: 15 });
  route.value = parseRoute("#/modules?kind=send&m=head");
  const filtered = makeIcicleModel({ ...facts, color: "kind" });
  expect([filtered.total, filtered.sizes[2]]).toEqual([5, 5]); // modules that are not selected, too
  expect(listColors(PAGE, WIRE!)).toEqual(["axis", "kind", "phase"]);
  expect(listColors(PAGE, PARAMETERS!)).toEqual(["own"]);
  route.value = parseRoute("#/modules");
});

const EARLIER = {
  recorded: ["parameters"],
  is_new: paths.map((path) => path.startsWith("layers.2")),
  parameters: [150, 10, 140, 30, 20, 6, 30, 20, 6, 0, 0, 0],
  gone: [{ parent: 2, name: "layers.{3…4}", num_modules: 2, parameters: 80 }],
};

test("a comparison is as wide as the larger recording, and shows what is gone", () => {
  const compared = { ...PAGE, modules: { ...modules, earlier: EARLIER } } as unknown as Page;
  page.value = compared;
  expect(listColors(compared, WIRE!)).not.toContain("change"); // the earlier one has no bytes
  expect(listColors(compared, PARAMETERS!)).toEqual(["change", "own"]);
  const facts = { page: compared, measure: PARAMETERS!, shown: FOLDED };
  const { roots, ...model } = makeIcicleModel({ ...facts, color: "change" });
  const [head, layers] = roots[0]!.children;
  expect([head!.width, layers!.width].map((width) => Math.round(180 * width))).toEqual([10, 170]);
  expect(layers!.children.map(({ id, size }) => [id, size])).toEqual([
    ["3", 90],
    ["gone-0", 80],
  ]);
  const input = {
    modules: compared.modules,
    model: { roots, ...model },
    labelOf: (i: number) => (i === 3 ? "0 … 2" : modules.label[i]!),
    words: [],
    isAncestor: () => false,
  };
  const [, , , layer, , , gone] = listBoxes(roots, FULL, 900, 9).map((box) => styleBox(box, input));
  expect(layer).toMatchObject({
    name: "0 … 2  × 3",
    figures: ["+30 (+50%), now 90", "+30 (+50%)"],
    segments: [{ series: 5, share: 1 }],
  });
  expect(gone).toMatchObject({ name: "{3…4}", figures: ["−80 (gone)"], isHatched: true });
  expect(["no change", "+5 (new)", "−3 (−60%)"]).toEqual([
    formatChange(5, 5, String),
    formatChange(5, 0, String),
    formatChange(2, 5, String),
  ]);
});

test("a folded box says the sum and the figure of each layer", () => {
  const facts = { page: PAGE, measure: PARAMETERS!, shown: FOLDED };
  const model = makeIcicleModel({ ...facts, color: "own" });
  const box = { node: findNode(model.roots, "3"), numMerged: 1, depth: 2, x: 0, width: 9 };
  const labelOf = (i: number): string => modules.label[i]!;
  const input = { modules, model, labelOf, words: ["head"], isAncestor: () => true };
  expect(styleBox(box, input)).toMatchObject({
    figures: ["90 in all, 30 each", "90"],
    isFaded: true,
    isAncestor: true,
  });
});

test("matches of a search count once, also inside of other matches", () => {
  expect(sumMatches(modules, SIZES, ["layers"])).toEqual({ numModules: 10, size: 90, total: 100 });
  expect(sumMatches(modules, SIZES, ["layers.1", "b"])).toMatchObject({ numModules: 1, size: 6 });
  expect(sumMatches(modules, SIZES, ["nothing"])).toMatchObject({ numModules: 0, size: 0 });
});

test("a name of a kind or phase has the same colour on every page", () => {
  expect(facetSeries("kind", "all_gather", 0)).toBe(facetSeries("kind", "all_gather", 5));
  expect(facetSeries("phase", "forward", 3)).toBe(7);
  expect(facetSeries("axis", "tp", 1)).toBe(1);
  expect(facetSeries("kind", "barrier", 1)).toBe(-1);
});

test("texts are cut to their room, and left out where two letters do not fit", () => {
  const context = { measureText: (text: string) => ({ width: 10 * text.length }) };
  const clip = (room: number) => clipText(context as CanvasRenderingContext2D, "attention", room);
  expect([clip(90), clip(89), clip(30), clip(29), clip(0)]).toEqual([
    "attention",
    "attenti…",
    "at…",
    "",
    "",
  ]);
});
