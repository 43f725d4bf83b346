/** The search, in every view: all words must occur, in any order and case. */
import { computed } from "@preact/signals";
import { route, setParam } from "./route";

export const search = computed(() => route.value.params.q ?? "");

export const words = computed(() => splitWords(search.value));

export function setSearch(text: string): void {
  setParam("q", text === "" ? null : text);
}

export function splitWords(text: string): string[] {
  return text.toLowerCase().split(/\s+/).filter(Boolean);
}

export function containsWords(text: string, searchWords: readonly string[]): boolean {
  const lower = text.toLowerCase();
  return searchWords.every((word) => lower.includes(word));
}
