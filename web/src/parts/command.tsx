/** A command to type, with a button that copies it. */
import { CopyButton } from "./copy_button";

/** The words of a command; lines break between them and not at hyphens. */
export function CommandWords({ text }: { text: string }) {
  return (
    <>
      {text.split(" ").flatMap((word, i) => [
        i ? " " : "",
        <span key={i} class="command-word">
          <Path text={word} />
        </span>,
      ])}
    </>
  );
}

/** A word, which may break after the folders of a path. */
function Path({ text }: { text: string }) {
  return <>{text.split(/(?<=\/)/).flatMap((part, i) => [i > 0 && <wbr key={i} />, part])}</>;
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
