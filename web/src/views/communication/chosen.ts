/** The collective that was chosen on the timeline or in the table; -1 is none. */
import { signal } from "@preact/signals";

export const chosenCall = signal(-1);
