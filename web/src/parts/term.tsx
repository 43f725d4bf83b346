/** A word with its meaning from the glossary, shown on hover and on focus. */
import { computed } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { page } from "../store/page";
import { tip } from "./tooltip";

const meanings = computed(
  () => new Map(page.value.terms.map(({ word, meaning }) => [word.toLowerCase(), meaning])),
);

/** The glossary's meaning of a word in singular or plural; undefined if it has none. */
export function meaningOf(word: string): string | undefined {
  const key = word.toLowerCase();
  return meanings.value.get(key) ?? meanings.value.get(key.replace(/s$/, ""));
}

interface Props {
  readonly word: string;
  readonly children?: ComponentChildren; // in place of the word
}

export function Term({ word, children }: Props) {
  const meaning = meaningOf(word);
  if (!meaning) return <>{children ?? word}</>;
  return (
    // biome-ignore lint/a11y/noNoninteractiveTabindex: focus shows the meaning, as hovering does
    <dfn class="term" tabIndex={0} aria-description={meaning} {...tip(meaning)}>
      {children ?? word}
    </dfn>
  );
}
