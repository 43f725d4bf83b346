/** Which modules the tree shows: what is open, what is folded, what was searched for. */
import type { Modules } from "../../page";
import { hasWords } from "../../store/search";

export interface Openness {
  readonly closed: ReadonlySet<number>; // modules whose children are not shown
  readonly unfolded: ReadonlySet<number>; // first ones whose likes are shown too
}

const MAX_OPEN = 80; // rows that a tree opens with
const OPEN_DEPTH = 2; // where it would have more

/** Whether a module is left out because an earlier one stands for it. */
export function isFoldedAway(modules: Modules, position: number, { unfolded }: Openness): boolean {
  const alike = modules.alike[position]!;
  return alike !== position && !unfolded.has(alike);
}

export function listRows(modules: Modules, openness: Openness): number[] {
  const rows: number[] = [];
  for (let i = 0; i < modules.path.length; ) {
    if (isFoldedAway(modules, i, openness)) {
      i = modules.end[i]!;
      continue;
    }
    rows.push(i);
    i = openness.closed.has(i) ? modules.end[i]! : i + 1;
  }
  return rows;
}

/** Modules that have the words, and those above them; one of many alike stands for all. */
export function findRows(
  modules: Modules,
  words: readonly string[],
  representatives: Int32Array,
): number[] {
  const isMatch = modules.path.map((path, i) => hasWords(`${path} ${modules.type[i]}`, words));
  const isShown = new Uint8Array(modules.path.length);
  isMatch.forEach((found, i) => {
    if (!found || (representatives[i] !== i && isMatch[representatives[i]!])) return;
    for (let at = i; at >= 0 && !isShown[at]; at = modules.parent[at]!) isShown[at] = 1;
  });
  return modules.path.map((_, i) => i).filter((i) => isShown[i]);
}

/** All open where that is little to read; else the upper levels. */
export function openAtFirst(modules: Modules): Openness {
  const open = { closed: new Set<number>(), unfolded: new Set<number>() };
  if (listRows(modules, open).length <= MAX_OPEN) return open;
  const depths = measureDepths(modules);
  const closed = depths.flatMap((depth, i) =>
    depth >= OPEN_DEPTH && hasChildren(modules, i) ? [i] : [],
  );
  return { closed: new Set(closed), unfolded: new Set() };
}

/** Opens and unfolds whatever hides a module. */
export function reveal(modules: Modules, position: number, openness: Openness): Openness {
  const closed = new Set(openness.closed);
  const unfolded = new Set(openness.unfolded);
  for (let at = position; at >= 0; at = modules.parent[at]!) {
    if (at !== position) closed.delete(at);
    if (modules.alike[at] !== at) unfolded.add(modules.alike[at]!);
  }
  return { closed, unfolded };
}

export function toggle(set: ReadonlySet<number>, position: number): Set<number> {
  const next = new Set(set);
  if (!next.delete(position)) next.add(position);
  return next;
}

export function hasChildren(modules: Modules, position: number): boolean {
  return modules.end[position]! > position + 1;
}

export function measureDepths(modules: Modules): number[] {
  const depths: number[] = [];
  modules.parent.forEach((parent, i) => {
    depths[i] = parent < 0 ? 0 : depths[parent]! + 1;
  });
  return depths;
}
