/** A line of the user's program: its location and its text. */
import { editorHref } from "../store/editor";
import { page } from "../store/page";
import { formatLocation } from "../store/selection";
import { CopyButton } from "./copy_button";
import { EditorLink } from "./editor_link";
import { FacetLink } from "./facet_link";

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

export function SourceLine({ source, isShort = false }: Props) {
  const { file, line, function: functions, text } = page.value.sources;
  if (source < 0 || file[source] === undefined) return null;
  const location = `${shortenPath(file[source])}:${line[source]}`;
  if (isShort) {
    return (
      <>
        <FacetLink facet="line" value={formatLocation(source)}>
          <span class="source-location mono">{location}</span>
        </FacetLink>
        {editorHref(file[source], line[source]!) && (
          <EditorLink file={file[source]} line={line[source]!} />
        )}
      </>
    );
  }
  return (
    <div class="source">
      <div class="source-head">
        <FacetLink facet="line" value={formatLocation(source)}>
          <span class="source-location mono">{location}</span>
        </FacetLink>
        {functions[source] && <span class="source-function">in {functions[source]}</span>}
        <CopyButton text={formatLocation(source)} label={`copy ${formatLocation(source)}`} />
        <EditorLink file={file[source]} line={line[source]!} />
      </div>
      {text[source] && <code class="source-text">{text[source].trim()}</code>}
    </div>
  );
}
