/**
 * The search, in every view: words, which must all occur, in any order and case; module patterns
 * such as `layers.*.attn`, which match names and what is inside them; or one regular expression
 * between slashes, such as `/attn|mlp/`.
 */
import { computed } from "@preact/signals";
import { page } from "./page";
import { isPattern, matchesInside, matchesName } from "./patterns";
import { route, setParam } from "./route";

export const search = computed(() => route.value.params.q ?? "");

/** The words, patterns or the regular expression; none if the expression is not valid. */
export const words = computed(() => (searchError.value ? [] : splitWords(search.value)));

/** Why the search is not a regular expression; empty if nothing is wrong. */
export const searchError = computed(() => {
  const [word = ""] = splitWords(search.value);
  if (!isExpression(word)) return "";
  try {
    makeExpression(word);
    return "";
  } catch (error) {
    const reason = String((error as Error).message)
      .split(": ")
      .at(-1)!;
    return `${word} is not a regular expression: ${reason.toLowerCase()}. All rows are shown.`;
  }
});

/** The search, if it is one module pattern that matches modules: it can then be selected. */
export const searchedPattern = computed(() => {
  const [word = "", ...more] = words.value;
  const isSelectable =
    !more.length &&
    !isExpression(word) &&
    isPattern(word) &&
    page.value.modules.path.some((path) => matchesName(word, path));
  return isSelectable ? word : "";
});

/** Typing replaces the entry of the browser's history, so that back returns to before the search. */
export function setSearch(text: string): void {
  setParam("q", text === "" ? null : text, { isReplacing: search.value !== "" });
}

export function splitWords(text: string): string[] {
  const trimmed = text.trim();
  return isExpression(trimmed) ? [trimmed] : trimmed.split(/\s+/).filter(Boolean);
}

function isExpression(word: string): boolean {
  return word.length > 2 && word.startsWith("/") && word.endsWith("/");
}

function makeExpression(word: string): RegExp {
  return new RegExp(word.slice(1, -1), "i");
}

type Matcher = (text: string) => boolean;
const matchers = new Map<string, Matcher>();

function makeMatcher(word: string): Matcher {
  if (isExpression(word)) {
    const expression = makeExpression(word);
    const hasAnchor = /[$^]/.test(word); // of a name or the whole row: `/w[qk]$/` finds modules
    return (text) =>
      expression.test(text) || (hasAnchor && listNames(text).some((name) => expression.test(name)));
  }
  const lower = word.toLowerCase();
  const contains: Matcher = (text) => text.toLowerCase().includes(lower);
  if (!isPattern(word)) return contains;
  const known = new Map<string, boolean>(); // the same names occur in many rows
  const matchesKnown = (name: string): boolean => {
    if (!known.has(name)) known.set(name, matchesInside(word, name));
    return known.get(name)!;
  };
  // `all_gather[tp]` has the characters of a pattern, and may be meant as it is.
  return (text) => contains(text) || listNames(text).some(matchesKnown);
}

function listNames(text: string): readonly string[] {
  return text.match(/[^\s,]+/g) ?? [];
}

/** Whether a text has all words, patterns or the expression. */
export function containsWords(text: string, searchWords: readonly string[]): boolean {
  return searchWords.every((word) => {
    let matches = matchers.get(word);
    if (!matches) {
      matches = makeMatcher(word);
      matchers.set(word, matches);
    }
    return matches(text);
  });
}

/** Splits a text at matches: every second part is a match. */
export function splitMatches(text: string, searchWords: readonly string[]): string[] {
  if (!searchWords.length) return [text];
  const escapeWord = (word: string): string => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  const sources = searchWords.flatMap((word) => {
    if (isExpression(word)) return [word.slice(1, -1)];
    const names = isPattern(word)
      ? listNames(text).filter((name) => matchesInside(word, name))
      : [];
    return [word, ...names].map(escapeWord);
  });
  const parts: string[] = [];
  let end = 0;
  for (const match of text.matchAll(new RegExp(sources.join("|"), "gi"))) {
    if (!match[0]) continue;
    parts.push(text.slice(end, match.index), match[0]);
    end = match.index + match[0].length;
  }
  return [...parts, text.slice(end)];
}
