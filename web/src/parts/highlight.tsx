/** Text with matches of the search highlighted. */
import { splitMatches, words } from "../store/search";

export function Highlight({ text }: { text: string }) {
  const parts = splitMatches(text, words.value);
  if (parts.length === 1) return <>{text}</>;
  return <>{parts.map((part, i) => (i % 2 ? <mark key={i}>{part}</mark> : part))}</>;
}
