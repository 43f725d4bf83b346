import { expect, test } from "vitest";
import type { Modules } from "../../page";
import { findRepresentatives } from "../../store/modules";
import { layOut } from "./layout";
import { findRows, isFoldedAway, listRows, openAtFirst, reveal } from "./rows";

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
  alike: [0, 1, 2, 3, 4, 5, 3, 7, 8, 3, 10, 11],
  repeat: [1, 1, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1],
} as unknown as Modules;
const folded = openAtFirst(modules);
const sizes = [100, 10, 90, 30, 20, 6, 30, 20, 6, 30, 20, 6];

function layOutFrom(zoomed: number, openness = folded) {
  const boxes = layOut({
    modules,
    sizeOf: (position) => sizes[position]!,
    zoomed,
    isFolded: (position) => isFoldedAway(modules, position, openness),
    minWidth: 0.001,
    maxDepth: 8,
  });
  return new Map(boxes.map((box) => [box.module, box]));
}

test("one layer stands for all until they are unfolded", () => {
  expect(listRows(modules, folded)).toEqual([0, 1, 2, 3, 4, 5]);
  expect(listRows(modules, { ...folded, unfolded: new Set([3]) })).toEqual(paths.map((_, i) => i));
});

test("what is closed hides all below it", () => {
  expect(listRows(modules, { ...folded, closed: new Set([2]) })).toEqual([0, 1, 2]);
});

test("a module that was selected elsewhere is opened and unfolded, and nothing else is", () => {
  const shown = reveal(modules, 7, { closed: new Set([2, 6, 9]), unfolded: new Set() });
  expect(listRows(modules, shown)).toEqual([0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
});

test("a search shows matches with what is above them, one for all that are alike", () => {
  const all = findRepresentatives(modules);
  expect(findRows(modules, ["layers", ".b"], all)).toEqual([0, 2, 3, 5]);
  expect(findRows(modules, ["layers.1.b"], all)).toEqual([0, 2, 6, 8]);
  expect(findRows(modules, ["nothing"], all)).toEqual([]);
});

test("what is below a folded layer is represented by what is below the first", () => {
  expect([...findRepresentatives(modules)]).toEqual([0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5]);
});

test("a folded layer is as wide as all that it stands for", () => {
  const boxes = layOutFrom(-1);
  expect(boxes.get(3)).toMatchObject({ left: 0.1, width: 0.9, value: 90, own: 12 });
  expect(boxes.get(4)!.width).toBeCloseTo(0.6);
  expect(boxes.has(6)).toBe(false);
});

test("unfolded layers lie side by side", () => {
  const boxes = layOutFrom(-1, { ...folded, unfolded: new Set([3]) });
  expect([3, 6, 9].map((one) => boxes.get(one)!.width)).toEqual([0.3, 0.3, 0.3]);
});

test("a zoomed module has the whole width, under those above it", () => {
  const boxes = layOutFrom(3);
  expect(boxes.get(3)).toMatchObject({ left: 0, width: 1, depth: 2, value: 90 });
  expect([boxes.get(0)!.width, boxes.get(2)!.width]).toEqual([1, 1]);
  // Inside a folded layer figures are still of all that it stands for.
  expect(layOutFrom(4).get(4)).toMatchObject({ width: 1, value: 60 });
});

test("children that add up to more than their parent still fit below it", () => {
  const tied = layOut({
    modules,
    sizeOf: (position) => (position === 0 ? 50 : sizes[position]!),
    zoomed: -1,
    isFolded: () => false,
    minWidth: 0,
    maxDepth: 2,
  });
  expect(tied.map((box) => box.left + box.width).reduce((a, b) => Math.max(a, b))).toBeCloseTo(1);
});
