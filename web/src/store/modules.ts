/** The selected modules, and the structure of the module tree: ancestors, identical layers. */
import { computed } from "@preact/signals";
import type { Modules } from "../page";
import { page } from "./page";
import { isPattern, matchesInside, matchesName } from "./patterns";
import { hrefTo, navigate, parseRoute, route } from "./route";

const positions = computed(() => {
  const positionsByPath = new Map<string, number>();
  page.value.modules.path.forEach((path, position) => {
    if (!positionsByPath.has(path)) positionsByPath.set(path, position);
  });
  return positionsByPath;
});

/** Position of the module of this name; -1 if there is none. */
export function findModule(path: string): number {
  return positions.value.get(path) ?? -1;
}

/** For each module, the position of the module that represents it when all layers are folded. */
export const representatives = computed(() => findRepresentatives(page.value.modules));

const NO_MODULE = "outside any module";

/** Position of the selected module; -1 if none is, or if a pattern selects several. */
export const selected = computed(() => {
  const path = route.value.params.m;
  return path === undefined ? -1 : (positions.value.get(path) ?? -1);
});

/** The pattern that selects several modules, such as `layers.*.attn`; empty if none does. */
export const modulePattern = computed(() => {
  const pattern = route.value.params.m ?? "";
  return selected.value < 0 && isPattern(pattern) && !judgeModule(pattern) ? pattern : "";
});

/** Why the page has no such modules; empty if it has. */
export function judgeModule(text: string): string {
  if (positions.value.has(text)) return "";
  if (!isPattern(text)) return "no module has this name";
  const isKnown = page.value.modules.path.some((path) => matchesName(text, path));
  return isKnown ? "" : "no module's name matches";
}

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

/** Whether a name, also of a module that the page does not have, is in a selected subtree. */
export function isNameSelected(name: string | undefined): boolean {
  if (!hasModuleSelection.value) return true;
  if (name === undefined || name === NO_MODULE) return false;
  if (modulePattern.value) return matchesInside(modulePattern.value, name);
  const path = page.value.modules.path[selected.value]!;
  return path === "" || name === path || name.startsWith(`${path}.`);
}

/** The same for rows that represent all identical layers by the first of them. */
export function isFoldedRowInSelection(position: number): boolean {
  if (!hasModuleSelection.value) return true;
  return position >= 0 && selectedRepresentatives.value[representatives.value[position]!] === 1;
}

/** A module's full path, or the root's label. */
export function moduleName(position: number): string {
  const { path, label } = page.value.modules;
  return path[position] || label[position] || NO_MODULE;
}
