/** The selected module, and questions about the tree: who is below whom, who is like whom. */
import { computed } from "@preact/signals";
import type { Modules } from "../page";
import { page } from "./page";
import { hrefTo, navigate, parseRoute, route } from "./route";

const positions = computed(() => {
  const found = new Map<string, number>();
  page.value.modules.path.forEach((path, position) => {
    if (!found.has(path)) found.set(path, position);
  });
  return found;
});

/** Position of the first of a module's like, its ancestors folded too. */
export const representatives = computed(() => findRepresentatives(page.value.modules));

/** Position of the selected module; -1 where none is. */
export const selected = computed(() => {
  const path = route.value.params.m;
  return path === undefined ? -1 : (positions.value.get(path) ?? -1);
});

export function findRepresentatives(modules: Modules): Int32Array {
  const found = new Int32Array(modules.path.length);
  for (let i = 0; i < found.length; i++) {
    const parent = modules.parent[i]!;
    const alike = modules.alike[i]!;
    const parentsLike = parent < 0 ? parent : found[parent]!;
    // Modules that are alike have the same below them, in the same order.
    found[i] =
      alike !== i ? found[alike]! : parentsLike === parent ? i : found[parentsLike + i - parent]!;
  }
  return found;
}

/** Address of the view that is shown (or of another) with this module selected; -1 selects none. */
export function hrefOfModule(position: number, view = route.value.view): string {
  return hrefTo(view, { m: position < 0 ? null : (page.value.modules.path[position] ?? null) });
}

/** Select a module everywhere; once more, or -1, selects none. */
export function select(position: number): void {
  navigate(parseRoute(hrefOfModule(position === selected.value ? -1 : position)));
}

/** Whether a module is the ancestor or below it. */
export function isWithin(position: number, ancestor: number): boolean {
  return position >= ancestor && position < (page.value.modules.end[ancestor] ?? -1);
}

/** Whether rows of a module belong to the selection; all do where nothing is selected. */
export function isInSelection(position: number): boolean {
  return selected.value < 0 || isWithin(position, selected.value);
}

/** The same for rows that stand for all layers of a kind, whose module is the first of them. */
export function isLikeSelection(position: number): boolean {
  if (selected.value < 0) return true;
  if (position < 0) return false;
  const all = representatives.value;
  return isWithin(all[position]!, all[selected.value]!);
}

/** From the root down to its parent. */
export function ancestorsOf(position: number): number[] {
  const found: number[] = [];
  for (let at = page.value.modules.parent[position] ?? -1; at >= 0; ) {
    found.unshift(at);
    at = page.value.modules.parent[at] ?? -1;
  }
  return found;
}

/** What a module is called where its place does not show: the whole path, or the root's label. */
export function nameOf(position: number): string {
  const { path, label } = page.value.modules;
  return path[position] || label[position] || "outside any module";
}
