/** State shared by the tree and the icicle chart: what is open and folded, kept in the address. */
import { computed } from "@preact/signals";
import { findRepresentatives, select, selectedRoots, selectPattern } from "../../store/modules";
import { page } from "../../store/page";
import { route, setParam } from "../../store/route";
import { countRepresented, patternOf } from "./folded_sums";
import {
  formatState,
  listClosable,
  measureDepths,
  parseState,
  reveal,
  type TreeState,
  toggle,
} from "./tree_rows";

const PARAM = "tree";

export const treeState = computed(() => parseState(page.value.modules, treeText.value));
const treeText = computed(() => route.value.params[PARAM] ?? "");

/** The back button does not go through what was opened and folded. */
function change(state: TreeState): void {
  const text = formatState(page.value.modules, state);
  setParam(PARAM, text || null, { isReplacing: true });
}

export const depths = computed(() => measureDepths(page.value.modules));

/** Label of the last identical sibling, by position of the first: `31` for `0`. */
const lastLabels = computed(() => {
  const { first_identical: firsts, label } = page.value.modules;
  const labels = new Map<number, string>();
  firsts.forEach((first, i) => {
    if (first !== i) labels.set(first, label[i]!);
  });
  return labels;
});

/** `attention`, or `0 … 31` if one layer represents all. */
export function labelOf(position: number): string {
  const label = page.value.modules.label[position]!;
  const last = lastLabels.value.get(position);
  return last === undefined || treeState.value.unfolded.has(position)
    ? label
    : `${label} … ${last}`;
}

/** For each module, the position of the module that represents it: itself unless layers are folded. */
export const shown = computed(() =>
  findRepresentatives(page.value.modules, treeState.value.unfolded),
);

/** How many modules each row or box represents. */
export const numRepresented = computed(() => countRepresented(shown.value));

/** The row or box of what is selected; -1 if nothing is, or what several of them represent. */
export const selectedShown = computed(() => {
  const [first = -1, ...rest] = new Set(selectedRoots.value.map((root) => shown.value[root]!));
  return rest.length ? -1 : first;
});

/** Selects all modules that a row or box represents; selecting them again clears the selection. */
export function selectShown(position: number): void {
  if (position < 0 || position === selectedShown.value) select(-1);
  else if (numRepresented.value[position] === 1) select(position);
  else selectPattern(patternOf(page.value.modules, shown.value, position));
}

export function toggleOpen(position: number): void {
  change({ ...treeState.value, closed: toggle(treeState.value.closed, position) });
}

export function toggleFold(position: number): void {
  change({ ...treeState.value, unfolded: toggle(treeState.value.unfolded, position) });
}

export function show(position: number): void {
  change(reveal(page.value.modules, position, treeState.value));
}

export function openAll(): void {
  change({ ...treeState.value, closed: new Set() });
}

/** Closes all modules but the roots, and folds all layers. */
export function closeAll(): void {
  change({ closed: listClosable(page.value.modules), unfolded: new Set() });
}
