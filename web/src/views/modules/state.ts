/** What the tree and the icicle share: what is open and folded, kept while one looks at other views. */
import { computed, signal } from "@preact/signals";
import { page } from "../../store/page";
import { measureDepths, type Openness, openAtFirst, reveal, toggle } from "./rows";

const changed = signal<Openness | null>(null);

export const openness = computed(() => changed.value ?? openAtFirst(page.value.modules));
export const depths = computed(() => measureDepths(page.value.modules));

/** Labels of the last ones that are like another: `31` for `0`. */
const lastLabels = computed(() => {
  const { alike, label } = page.value.modules;
  const found = new Map<number, string>();
  alike.forEach((first, i) => {
    if (first !== i) found.set(first, label[i]!);
  });
  return found;
});

/** `attention`, or `0 … 31` where one stands for all. */
export function labelOf(position: number): string {
  const label = page.value.modules.label[position]!;
  const last = lastLabels.value.get(position);
  return last === undefined || openness.value.unfolded.has(position) ? label : `${label} … ${last}`;
}

/** Module that has the whole width of the icicle; -1 is none. */
export const zoomed = signal(-1);

export function toggleOpen(position: number): void {
  changed.value = { ...openness.value, closed: toggle(openness.value.closed, position) };
}

export function toggleFold(position: number): void {
  changed.value = { ...openness.value, unfolded: toggle(openness.value.unfolded, position) };
}

export function show(position: number): void {
  changed.value = reveal(page.value.modules, position, openness.value);
}

export function openAll(): void {
  changed.value = { ...openness.value, closed: new Set() };
}

/** All but the roots closed, and every layer folded. */
export function closeAll(): void {
  const { parent } = page.value.modules;
  const closed = parent.flatMap((one, i) => (one < 0 ? [] : [i]));
  changed.value = { closed: new Set(closed), unfolded: new Set() };
}
