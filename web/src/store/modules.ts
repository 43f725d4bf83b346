/** The selected modules, and the structure of the module tree: ancestors, identical layers. */
import { computed } from "@preact/signals";
import type { Modules } from "../page";
import { page } from "./page";
import { isPattern, matchesName } from "./patterns";
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

/** Position of the selected module; -1 if none is, or if a pattern selects several. */
export const selected = computed(() => {
  const path = route.value.params.m;
  return path === undefined ? -1 : (positions.value.get(path) ?? -1);
});

/** The pattern that selects several modules, such as `layers.*.attn`; empty if none does. */
export const modulePattern = computed(() => {
  const pattern = route.value.params.m ?? "";
  return selected.value < 0 && isPattern(pattern) ? pattern : "";
});

/** Positions of the modules that are selected with their descendants. */
export const selectedRoots = computed<readonly number[]>(() => {
  if (selected.value >= 0) return [selected.value];
  const pattern = modulePattern.value;
  if (!pattern) return [];
  return page.value.modules.path.flatMap((path, i) => (matchesName(pattern, path) ? [i] : []));
});

export const hasModuleSelection = computed(() => selected.value >= 0 || modulePattern.value !== "");

/** The name or the pattern of what is selected. */
export const selectedName = computed(() => modulePattern.value || moduleName(selected.value));

/** For each module, 1 if it is in a selected subtree. */
const selectedModules = computed(() => markSubtrees(selectedRoots.value));

/** The same if all identical layers are represented by the first of them. */
const selectedRepresentatives = computed(() =>
  markSubtrees(selectedRoots.value.map((root) => representatives.value[root]!)),
);

function markSubtrees(roots: readonly number[]): Uint8Array {
  const { path, end } = page.value.modules;
  const marks = new Uint8Array(path.length);
  for (const root of roots) marks.fill(1, root, end[root]!);
  return marks;
}

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

/** Selects all modules that a pattern matches, in every view. */
export function selectPattern(pattern: string): void {
  navigate(parseRoute(hrefTo(route.value.view, { m: pattern })));
}

/** Selects a module in every view; selecting it again, or -1, clears the selection. */
export function select(position: number): void {
  navigate(parseRoute(moduleHref(position === selected.value ? -1 : position)));
}

/** Whether a module is in a selected subtree; true for all if nothing is selected. */
export function isInSelection(position: number): boolean {
  return !hasModuleSelection.value || selectedModules.value[position] === 1;
}

/** The same for rows that represent all identical layers by the first of them. */
export function isFoldedRowInSelection(position: number): boolean {
  if (!hasModuleSelection.value) return true;
  return position >= 0 && selectedRepresentatives.value[representatives.value[position]!] === 1;
}

/** A module's full path, or the root's label. */
export function moduleName(position: number): string {
  const { path, label } = page.value.modules;
  return path[position] || label[position] || "outside any module";
}
