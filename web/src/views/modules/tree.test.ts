import { expect, test } from "vitest";
import type { Modules } from "../../page";
import { findRepresentatives } from "../../store/modules";
import {
  findRows,
  formatState,
  listRows,
  makeInitialState,
  parseState,
  reveal,
  toggle,
} from "./tree_rows";

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

test("what is open and folded is a short text in the address", () => {
  expect(formatState(modules, folded)).toBe("");
  const changed = { closed: toggle(folded.closed, 2), unfolded: new Set([3]) };
  expect(formatState(modules, changed)).toBe(".2.x3");
  expect(parseState(modules, ".2.x3")).toEqual(changed);
  const closed = { closed: new Set([2, 3, 6, 9]), unfolded: new Set<number>() };
  expect(formatState(modules, closed)).toBe("closed");
  expect(parseState(modules, "closed.2")).toEqual({
    closed: new Set([3, 6, 9]),
    unfolded: new Set(),
  });
  expect(parseState(modules, "no.such.text")).toEqual(folded);
});
