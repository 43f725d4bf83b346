/** A line of the user's program: its location and its text. */

import { editorHref } from "../store/editor";
import { page } from "../store/page";
import { CopyButton } from "./copy_button";
import { EditorLink } from "./editor_link";

interface Props {
  readonly source: number; // position in the page's sources; -1 is none
  readonly isShort?: boolean; // without its text, for a cell of a table
}

const MAX_FOLDERS = 2;

/** `…/models/llama/attention.py`: the end of a path identifies it. */
export function shortenPath(file: string): string {
  const parts = file.split("/");
  return parts.length > MAX_FOLDERS + 1 ? `…/${parts.slice(-MAX_FOLDERS - 1).join("/")}` : file;
}

/** `models/llama.py:121`, for columns that sort and search by it. */
export function formatLocation(source: number): string {
  const { file, line } = page.value.sources;
  return source < 0 || file[source] === undefined ? "" : `${file[source]}:${line[source]}`;
}

export function SourceLine({ source, isShort = false }: Props) {
  const { file, line, function: functions, text } = page.value.sources;
  if (source < 0 || file[source] === undefined) return null;
  const location = `${shortenPath(file[source])}:${line[source]}`;
  if (isShort) return <ShortLocation source={source} text={location} />;
  return (
    <div class="source">
      <div class="source-head">
        <span class="source-location mono" title={formatLocation(source)}>
          {location}
        </span>
        {functions[source] && <span class="source-function">in {functions[source]}</span>}
        <CopyButton text={formatLocation(source)} label={`copy ${formatLocation(source)}`} />
        <EditorLink file={file[source]} line={line[source]!} />
      </div>
      {text[source] && <code class="source-text">{text[source].trim()}</code>}
    </div>
  );
}

/** The location in a cell of a table: a link, once an editor is chosen. */
function ShortLocation({ source, text }: { source: number; text: string }) {
  const { file, line } = page.value.sources;
  const href = editorHref(file[source]!, line[source]!);
  const title = formatLocation(source);
  if (!href) {
    return (
      <span class="source-location mono" title={title}>
        {text}
      </span>
    );
  }
  return (
    <a
      class="source-location mono"
      href={href}
      title={`open ${title}`}
      onClick={(event) => event.stopPropagation()}
    >
      {text}
    </a>
  );
}
