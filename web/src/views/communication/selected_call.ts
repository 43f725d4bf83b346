/** The collective that is selected on the timeline or in the table. */
import { signal } from "@preact/signals";

interface CallSelection {
  readonly row: number; // -1 is none
  readonly isOnTimeline: boolean; // selected there, so its details are shown below the timeline
}

export const selectedCall = signal<CallSelection>({ row: -1, isOnTimeline: false });

export function selectCall(row: number, { isOnTimeline = false } = {}): void {
  if (row !== selectedCall.value.row || isOnTimeline) selectedCall.value = { row, isOnTimeline };
}
