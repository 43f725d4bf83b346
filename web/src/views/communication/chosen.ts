/** The collective that was chosen on the timeline or in the table. */
import { signal } from "@preact/signals";

interface Chosen {
  readonly row: number; // -1 is none
  readonly isOnTimeline: boolean; // where it is told, so that nobody has to look elsewhere
}

export const chosen = signal<Chosen>({ row: -1, isOnTimeline: false });

export function chooseCall(row: number, { isOnTimeline = false } = {}): void {
  if (row !== chosen.value.row || isOnTimeline) chosen.value = { row, isOnTimeline };
}
