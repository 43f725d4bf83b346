/** Text with matches of the search highlighted. */
import { words } from "../store/search";

/** Splits a text at matches: every second part is a match. */
export function splitMatches(text: string, searchWords: readonly string[]): string[] {
  if (!searchWords.length) return [text];
  const escaped = searchWords.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return text.split(new RegExp(`(${escaped.join("|")})`, "i"));
}

export function Highlight({ text }: { text: string }) {
  const parts = splitMatches(text, words.value);
  if (parts.length === 1) return <>{text}</>;
  return <>{parts.map((part, i) => (i % 2 ? <mark key={i}>{part}</mark> : part))}</>;
}
