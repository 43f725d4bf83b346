import { expect, test } from "vitest";
import type { Modules } from "../../page";
import { findRepresentatives } from "../../store/modules";
import { layoutIcicle } from "./icicle_layout";
import { findRows, isFoldedAway, listRows, makeInitialState, reveal } from "./tree_rows";

// root ─ head, layers ─ 0 ─ a, b │ 1 ─ a, b │ 2 ─ a, b
const paths = [
  "",
  "head",
  "layers",
  ...[0, 1, 2].flatMap((i) => [`layers.${i}`, `layers.${i}.a`, `layers.${i}.b`]),
];
const modules = {
  path: paths,
  label: paths.map((path) => path.split(".").at(-1)!),
  type: paths.map(() => "Module"),
  parent: [-1, 0, 0, 2, 3, 3, 2, 6, 6, 2, 9, 9],
  end: [12, 2, 12, 6, 5, 6, 9, 8, 9, 12, 11, 12],
  first_identical: [0, 1, 2, 3, 4, 5, 3, 7, 8, 3, 10, 11],
  repeat: [1, 1, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1],
} as unknown as Modules;
const folded = makeInitialState(modules);
const sizes = [100, 10, 90, 30, 20, 6, 30, 20, 6, 30, 20, 6];

function layoutFrom(zoomed: number, treeState = folded) {
  const boxes = layoutIcicle({
    modules,
    sizeOf: (position) => sizes[position]!,
    zoomed,
    isFolded: (position) => isFoldedAway(modules, position, treeState),
    minWidth: 0.001,
    maxDepth: 8,
  });
  return new Map(boxes.map((box) => [box.module, box]));
}

test("the first of identical layers represents all of them until they are unfolded", () => {
  expect(listRows(modules, folded)).toEqual([0, 1, 2, 3, 4, 5]);
  expect(listRows(modules, { ...folded, unfolded: new Set([3]) })).toEqual(paths.map((_, i) => i));
});

test("a closed module hides its descendants", () => {
  expect(listRows(modules, { ...folded, closed: new Set([2]) })).toEqual([0, 1, 2]);
});

test("selecting a module elsewhere expands only its ancestors", () => {
  const shown = reveal(modules, 7, { closed: new Set([2, 6, 9]), unfolded: new Set() });
  expect(listRows(modules, shown)).toEqual([0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
});

test("a search shows matches with their ancestors, and identical modules once", () => {
  const all = findRepresentatives(modules);
  expect(findRows(modules, ["layers", ".b"], all)).toEqual([0, 2, 3, 5]);
  expect(findRows(modules, ["layers.1.b"], all)).toEqual([0, 2, 6, 8]);
  expect(findRows(modules, ["nothing"], all)).toEqual([]);
});

test("descendants of a folded layer are represented by those of the first layer", () => {
  expect([...findRepresentatives(modules)]).toEqual([0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5]);
});

test("a folded layer is as wide as all layers that it represents", () => {
  const boxes = layoutFrom(-1);
  expect(boxes.get(3)).toMatchObject({ left: 0.1, width: 0.9, value: 90, own: 12 });
  expect(boxes.get(4)!.width).toBeCloseTo(0.6);
  expect(boxes.has(6)).toBe(false);
});

test("unfolded layers are side by side", () => {
  const boxes = layoutFrom(-1, { ...folded, unfolded: new Set([3]) });
  expect([3, 6, 9].map((position) => boxes.get(position)!.width)).toEqual([0.3, 0.3, 0.3]);
});

test("a zoomed module has the full width, below its ancestors", () => {
  const boxes = layoutFrom(3);
  expect(boxes.get(3)).toMatchObject({ left: 0, width: 1, depth: 2, value: 90 });
  expect([boxes.get(0)!.width, boxes.get(2)!.width]).toEqual([1, 1]);
  // Inside a folded layer, values are still of all layers that it represents.
  expect(layoutFrom(4).get(4)).toMatchObject({ width: 1, value: 60 });
});

test("children that add up to more than their parent still fit below it", () => {
  const tied = layoutIcicle({
    modules,
    sizeOf: (position) => (position === 0 ? 50 : sizes[position]!),
    zoomed: -1,
    isFolded: () => false,
    minWidth: 0,
    maxDepth: 2,
  });
  expect(tied.map((box) => box.left + box.width).reduce((a, b) => Math.max(a, b))).toBeCloseTo(1);
});
