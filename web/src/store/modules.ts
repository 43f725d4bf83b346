/** The selected module, and the structure of the module tree: ancestors, identical layers. */
import { computed } from "@preact/signals";
import type { Modules } from "../page";
import { page } from "./page";
import { hrefTo, navigate, parseRoute, route } from "./route";

const positions = computed(() => {
  const positionsByPath = new Map<string, number>();
  page.value.modules.path.forEach((path, position) => {
    if (!positionsByPath.has(path)) positionsByPath.set(path, position);
  });
  return positionsByPath;
});

/** For each module, the position of the module that represents it when all layers are folded. */
export const representatives = computed(() => findRepresentatives(page.value.modules));

/** Position of the selected module; -1 is none. */
export const selected = computed(() => {
  const path = route.value.params.m;
  return path === undefined ? -1 : (positions.value.get(path) ?? -1);
});

/** `unfolded` holds first layers whose identical siblings represent themselves. */
export function findRepresentatives(
  modules: Modules,
  unfolded: ReadonlySet<number> = new Set(),
): Int32Array {
  const firsts = new Int32Array(modules.path.length);
  for (let i = 0; i < firsts.length; i++) {
    const parent = modules.parent[i]!;
    const first = unfolded.has(modules.first_identical[i]!) ? i : modules.first_identical[i]!;
    const parentFirst = parent < 0 ? parent : firsts[parent]!;
    // Identical modules have the same descendants in the same order.
    firsts[i] =
      first !== i ? firsts[first]! : parentFirst === parent ? i : firsts[parentFirst + i - parent]!;
  }
  return firsts;
}

/** Address of a view (by default the current one) with this module selected; -1 selects none. */
export function moduleHref(position: number, view = route.value.view): string {
  return hrefTo(view, { m: position < 0 ? null : (page.value.modules.path[position] ?? null) });
}

/** Selects a module in every view; selecting it again, or -1, clears the selection. */
export function select(position: number): void {
  navigate(parseRoute(moduleHref(position === selected.value ? -1 : position)));
}

/** Whether a module is the ancestor or one of its descendants. */
export function isInSubtree(position: number, ancestor: number): boolean {
  return position >= ancestor && position < (page.value.modules.end[ancestor] ?? -1);
}

/** Whether a module is in the selected subtree; true for all if nothing is selected. */
export function isInSelection(position: number): boolean {
  return selected.value < 0 || isInSubtree(position, selected.value);
}

/** The same for rows that represent all identical layers by the first of them. */
export function isFoldedRowInSelection(position: number): boolean {
  if (selected.value < 0) return true;
  if (position < 0) return false;
  const firsts = representatives.value;
  return isInSubtree(firsts[position]!, firsts[selected.value]!);
}

/** Ancestors of a module, from the root to its parent. */
export function listAncestors(position: number): number[] {
  const ancestors: number[] = [];
  for (let ancestor = page.value.modules.parent[position] ?? -1; ancestor >= 0; ) {
    ancestors.unshift(ancestor);
    ancestor = page.value.modules.parent[ancestor] ?? -1;
  }
  return ancestors;
}

/** A module's full path, or the root's label. */
export function moduleName(position: number): string {
  const { path, label } = page.value.modules;
  return path[position] || label[position] || "outside any module";
}
