/** A command to type, with a button that copies it. */
import { CopyButton } from "./copy_button";

export function Command({ text }: { text: string }) {
  return (
    <div class="command">
      <code>
        {text.split(" ").flatMap((word, i) => [
          i ? " " : "",
          <span key={i} class="command-word">
            {word}
          </span>,
        ])}
      </code>
      <CopyButton text={text} label={`copy ${text}`} />
    </div>
  );
}
