/** Which modules the tree shows, given what is open, folded and searched for. */
import type { Modules } from "../../page";
import { containsWords } from "../../store/search";

export interface TreeState {
  readonly closed: ReadonlySet<number>; // modules whose children are not shown
  readonly unfolded: ReadonlySet<number>; // first layers whose identical siblings are shown too
}

const MAX_OPEN = 80; // rows; a larger tree starts closed below OPEN_DEPTH
const OPEN_DEPTH = 2;

/** Whether a module is hidden because an identical sibling represents it. */
export function isFoldedAway(modules: Modules, position: number, { unfolded }: TreeState): boolean {
  const first = modules.first_identical[position]!;
  return first !== position && !unfolded.has(first);
}

export function listRows(modules: Modules, treeState: TreeState): number[] {
  const rows: number[] = [];
  for (let i = 0; i < modules.path.length; ) {
    if (isFoldedAway(modules, i, treeState)) {
      i = modules.end[i]!;
      continue;
    }
    rows.push(i);
    i = treeState.closed.has(i) ? modules.end[i]! : i + 1;
  }
  return rows;
}

/** Modules that match the words, and their ancestors; one of several identical modules represents all. */
export function findRows(
  modules: Modules,
  words: readonly string[],
  representatives: Int32Array,
): number[] {
  const isMatch = modules.path.map((path, i) => containsWords(`${path} ${modules.type[i]}`, words));
  const isShown = new Uint8Array(modules.path.length);
  isMatch.forEach((isFound, i) => {
    if (!isFound || (representatives[i] !== i && isMatch[representatives[i]!])) return;
    for (
      let ancestor = i;
      ancestor >= 0 && !isShown[ancestor];
      ancestor = modules.parent[ancestor]!
    )
      isShown[ancestor] = 1;
  });
  return modules.path.map((_, i) => i).filter((i) => isShown[i]);
}

/** Everything open if there are few rows, else the upper levels. */
export function makeInitialState(modules: Modules): TreeState {
  const state = { closed: new Set<number>(), unfolded: new Set<number>() };
  if (listRows(modules, state).length <= MAX_OPEN) return state;
  const depths = measureDepths(modules);
  const closed = depths.flatMap((depth, i) =>
    depth >= OPEN_DEPTH && hasChildren(modules, i) ? [i] : [],
  );
  return { closed: new Set(closed), unfolded: new Set() };
}

/** Opens and unfolds the ancestors that hide a module. */
export function reveal(modules: Modules, position: number, treeState: TreeState): TreeState {
  const closed = new Set(treeState.closed);
  const unfolded = new Set(treeState.unfolded);
  for (let ancestor = position; ancestor >= 0; ancestor = modules.parent[ancestor]!) {
    if (ancestor !== position) closed.delete(ancestor);
    if (modules.first_identical[ancestor] !== ancestor)
      unfolded.add(modules.first_identical[ancestor]!);
  }
  return { closed, unfolded };
}

export function toggle(set: ReadonlySet<number>, position: number): Set<number> {
  return toggleAll(set, [position]);
}

function toggleAll(set: ReadonlySet<number>, positions: Iterable<number>): Set<number> {
  const next = new Set(set);
  for (const position of positions) if (!next.delete(position)) next.add(position);
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

/** All modules with children but the roots. */
export function listClosable(modules: Modules): ReadonlySet<number> {
  const closable = modules.parent.flatMap((parent, i) =>
    parent >= 0 && hasChildren(modules, i) ? [i] : [],
  );
  return new Set(closable);
}

/** States that others are described by their differences to: as it begins, all open, all closed. */
const BASES: Readonly<Record<string, (modules: Modules) => TreeState>> = {
  "": makeInitialState,
  open: () => ({ closed: new Set(), unfolded: new Set() }),
  closed: (modules) => ({ closed: listClosable(modules), unfolded: new Set() }),
};

/** `open.12.x40`: all open, but 12 is closed, and the layers that 40 represents are unfolded. */
export function formatState(modules: Modules, state: TreeState): string {
  const texts = Object.entries(BASES).map(([name, make]) => {
    const base = make(modules);
    const toggled = [...toggleAll(base.closed, state.closed)].sort((a, b) => a - b);
    const unfolded = [...state.unfolded].sort((a, b) => a - b).map((position) => `x${position}`);
    return [name, ...toggled, ...unfolded].join(".");
  });
  return texts.reduce((shortest, text) => (text.length < shortest.length ? text : shortest));
}

export function parseState(modules: Modules, text: string): TreeState {
  const [name = "", ...changes] = text.split(".");
  const { closed } = (BASES[name] ?? makeInitialState)(modules);
  const toggled = changes.filter((change) => /^\d+$/.test(change)).map(Number);
  const unfolded = changes.flatMap((change) => (/^x\d+$/.test(change) ? [+change.slice(1)] : []));
  return { closed: toggleAll(closed, toggled), unfolded: new Set(unfolded) };
}
