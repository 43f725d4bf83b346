/** A line of the user's program: where it is, and what it says. */
import { page } from "../store/page";
import { CopyButton } from "./copy";

interface Props {
  readonly source: number; // position in the page's sources; -1 is none
  readonly isShort?: boolean; // without its text, for a cell of a table
}

const KEPT_FOLDERS = 2;

/** `…/models/llama/attention.py`: a path's end is what people know it by. */
export function shortenPath(file: string): string {
  const parts = file.split("/");
  return parts.length > KEPT_FOLDERS + 1 ? `…/${parts.slice(-KEPT_FOLDERS - 1).join("/")}` : file;
}

/** `models/llama.py:121`, for columns that sort and search by it. */
export function placeOf(source: number): string {
  const { file, line } = page.value.sources;
  return source < 0 || file[source] === undefined ? "" : `${file[source]}:${line[source]}`;
}

export function SourceLine({ source, isShort = false }: Props) {
  const { file, line, function: functions, text } = page.value.sources;
  if (source < 0 || file[source] === undefined) return null;
  const place = `${shortenPath(file[source])}:${line[source]}`;
  if (isShort) {
    return (
      <span class="source-place mono" title={placeOf(source)}>
        {place}
      </span>
    );
  }
  return (
    <div class="source">
      <div class="source-head">
        <span class="source-place mono" title={placeOf(source)}>
          {place}
        </span>
        {functions[source] && <span class="source-function">in {functions[source]}</span>}
        <CopyButton text={placeOf(source)} label={`copy ${placeOf(source)}`} />
      </div>
      {text[source] && <code class="source-text">{text[source].trim()}</code>}
    </div>
  );
}
