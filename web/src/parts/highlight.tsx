/** Text with matches of the search highlighted. */
import { createContext } from "preact";
import { useContext } from "preact/hooks";
import { splitMatches, words } from "../store/search";
import { splitNames } from "./column_layout";

/** Whether names have several lines, and so are broken between their parts. */
export const InLines = createContext(false);

export function Highlight({ text }: { text: string }) {
  const isBreakable = useContext(InLines);
  const parts = splitMatches(text, words.value);
  if (parts.length === 1 && !isBreakable) return <>{text}</>;
  return (
    <>
      {parts.map((part, i) => {
        const words = isBreakable ? <Breakable key={i} text={part} /> : part;
        return i % 2 ? <mark key={i}>{words}</mark> : words;
      })}
    </>
  );
}

/** `layers.0.attention`, `reduce_scatter`, which may be broken after a dot or an underscore. */
export function Breakable({ text }: { text: string }) {
  return <>{splitNames(text).flatMap((part, i) => (i ? [<wbr key={i} />, part] : [part]))}</>;
}
