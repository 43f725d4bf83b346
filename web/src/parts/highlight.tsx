/** Text with what was searched for marked in it. */
import { words } from "../store/search";

/** Pieces of a text; every second one is a match. */
export function splitMatches(text: string, wanted: readonly string[]): string[] {
  if (!wanted.length) return [text];
  const escaped = wanted.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return text.split(new RegExp(`(${escaped.join("|")})`, "i"));
}

export function Highlight({ text }: { text: string }) {
  const parts = splitMatches(text, words.value);
  if (parts.length === 1) return <>{text}</>;
  return <>{parts.map((part, i) => (i % 2 ? <mark key={i}>{part}</mark> : part))}</>;
}
