/** A command to type, with a button that copies it. */
import { CopyButton } from "./copy_button";

/** The words of a command; lines break between them and not at hyphens. */
export function CommandWords({ text }: { text: string }) {
  return (
    <>
      {text.split(" ").flatMap((word, i) => [
        i ? " " : "",
        <span key={i} class="command-word">
          {word}
        </span>,
      ])}
    </>
  );
}

export function Command({ text }: { text: string }) {
  return (
    <div class="command">
      <code>
        <CommandWords text={text} />
      </code>
      <CopyButton text={text} label={`copy ${text}`} />
    </div>
  );
}
