/** Reads a report or a recording that the page is to be compared with. */
import type { Page } from "../page";
import type { Earlier } from "./earlier";
import { page, parsePage } from "./page";
import { listRecordedFigures, NOT_COMPARED } from "./recorded_figures";
import { RECORDING_SCHEMA, type RecordedRun, readRecordedData } from "./recorded_run";

const FORMAT = "shardscope.recording";
const STREAM = "shardscope.stream";
const MAX_BYTES = 256 << 20;

export async function readEarlier(file: File): Promise<Earlier> {
  if (file.size > MAX_BYTES) {
    throw new Error(
      `'${file.name}' is larger than ${MAX_BYTES >> 20} MiB. ` +
        `Compare it with: ${reportCommand(file.name)}.`,
    );
  }
  const text = await readText(file);
  return text.trimStart().startsWith("<")
    ? readReport(file.name, text)
    : readRecording(file.name, text);
}

/** The command that writes a page of both recordings. */
function reportCommand(before: string): string {
  const { file } = page.value.run;
  const after = file && !file.includes(", ") ? file : "AFTER";
  return `shardscope report ${quote(after)} --against ${quote(before)}`;
}

function quote(name: string): string {
  return /^[\w@%+=:,./-]+$/.test(name) ? name : `'${name.replaceAll("'", `'"'"'`)}'`;
}

/** The file's text, uncompressed. */
async function readText(file: File): Promise<string> {
  const start = new Uint8Array(await file.slice(0, 4).arrayBuffer());
  if (start[0] !== 0x1f || start[1] !== 0x8b) return file.text();
  try {
    const stream = file.stream().pipeThrough(new DecompressionStream("gzip"));
    return await new Response(stream).text();
  } catch {
    throw new Error(`'${file.name}' is not complete: it cannot be decompressed. Copy it again.`);
  }
}

function readReport(name: string, text: string): Earlier {
  // A parsed document runs no scripts.
  const data = new DOMParser().parseFromString(text, "text/html").getElementById("page");
  if (!data) {
    throw new Error(
      `'${name}' is HTML, but no report of shardscope. Drop a report or a recording.`,
    );
  }
  let earlierPage: Page;
  try {
    earlierPage = parsePage(data.textContent);
  } catch {
    throw new Error(
      `'${name}' is a report of another version of shardscope. Create it again with this version.`,
    );
  }
  const { figures, figure_parts, modules, communication, memory } = earlierPage;
  return {
    name,
    figures,
    data: { modules: modules.path, communication, memory, figure_parts, sizes: modules },
    omitted: {},
    command: "",
  };
}

function readRecording(name: string, text: string): Earlier {
  const recording = parseRecording(name, text);
  if (recording.format !== FORMAT) {
    throw new Error(
      recording.format === STREAM
        ? `'${name}' is a stream. Join its ranks first: shardscope merge.`
        : `'${name}' is no recording of shardscope. Drop a report (.html) or a recording (.json, .json.gz).`,
    );
  }
  if (recording.schema !== RECORDING_SCHEMA) {
    throw new Error(
      `'${name}' was saved by another version of shardscope (schema ${recording.schema}). ` +
        `Save it again: shardscope merge ${quote(name)} -o before.json.gz`,
    );
  }
  return {
    name,
    figures: listRecordedFigures(recording),
    data: readRecordedData(recording),
    omitted: NOT_COMPARED,
    command: reportCommand(name),
  };
}

function parseRecording(name: string, text: string): RecordedRun {
  try {
    const first = text.slice(0, text.indexOf("\n") + 1);
    if (first.includes(STREAM)) return { format: STREAM };
    const value: unknown = JSON.parse(text);
    if (typeof value === "object" && value !== null) return value as RecordedRun;
  } catch {
    // Explained below.
  }
  if (text.startsWith("PAR1")) {
    throw new Error(
      `'${name}' is in Parquet, which this page cannot read. Write a page of both recordings ` +
        `with \`${reportCommand(name)}\`, or drop a report (.html).`,
    );
  }
  throw new Error(
    `'${name}' is neither a report nor a recording of shardscope. ` +
      "Drop a report (.html) or a recording (.json, .json.gz).",
  );
}
