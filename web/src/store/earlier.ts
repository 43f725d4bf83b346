/** The page or recording that this page is compared with: given when it was made, or dropped onto it. */
import { computed, signal } from "@preact/signals";
import type { Figure } from "../page";
import type { EarlierData } from "./earlier_data";
import { page } from "./page";
import { readEarlier } from "./read_earlier";

export interface Earlier {
  readonly name: string;
  readonly figures: readonly Figure[]; // of views other than communication and memory
  readonly data: EarlierData | null; // what those of communication and memory are summed from
  readonly omitted: Readonly<Record<string, string>>; // what is not compared, by view
  readonly command: string; // that compares everything; empty if nothing is omitted
}

const dropped = signal<Earlier | null>(null);

/** Why a file could not be compared; empty if none failed. */
export const dropError = signal("");

export const earlier = computed<Earlier | null>(() => {
  if (dropped.value) return dropped.value;
  const { comparison, earlier: recording, earlier_figures: figures } = page.value;
  if (!comparison) return null;
  const data = recording && { ...recording, sizes: null };
  return { name: comparison.before, figures, data, omitted: {}, command: "" };
});

export const isDropped = computed(() => dropped.value !== null);

export function forgetDropped(): void {
  dropped.value = null;
}

/** Compares the page with a file of the user's: a report, or a recording. */
export async function compareWithFile(file: File): Promise<void> {
  try {
    dropped.value = await readEarlier(file);
    dropError.value = "";
  } catch (error) {
    dropError.value = error instanceof Error ? error.message : String(error);
  }
}
