/** The page or recording that this page is compared with: given when it was made, or dropped onto it. */
import { computed, signal } from "@preact/signals";
import type { Figure, Page } from "../page";
import { page, parsePage } from "./page";
import { listRecordingFigures, type RecordedRun } from "./recording_figures";

export interface Earlier {
  readonly name: string;
  readonly figures: readonly Figure[];
  readonly note: string; // what could not be compared, and how it can
}

const FORMAT = "shardscope.recording";
const STREAM = "shardscope.stream";
const MAX_BYTES = 256 << 20;

const dropped = signal<Earlier | null>(null);

/** Why a file could not be compared; empty if none failed. */
export const dropError = signal("");

export const earlier = computed<Earlier | null>(() => {
  if (dropped.value) return dropped.value;
  const { comparison, earlier_figures: figures } = page.value;
  return comparison ? { name: comparison.before, figures, note: "" } : null;
});

export const isDropped = computed(() => dropped.value !== null);

export function forgetDropped(): void {
  dropped.value = null;
}

/** Compares the page with a file of the user's: a report, or a recording. */
export async function compareWithFile(file: File): Promise<void> {
  try {
    dropped.value = await readEarlier(file);
    dropError.value = "";
  } catch (error) {
    dropError.value = error instanceof Error ? error.message : String(error);
  }
}

export async function readEarlier(file: File): Promise<Earlier> {
  if (file.size > MAX_BYTES) {
    throw new Error(
      `'${file.name}' is larger than ${MAX_BYTES >> 20} MiB. ` +
        "Compare it with: shardscope report AFTER --against BEFORE.",
    );
  }
  const text = await readText(file);
  return text.trimStart().startsWith("<")
    ? readReport(file.name, text)
    : readRecording(file.name, text);
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
  return { name, figures: earlierPage.figures, note: "" };
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
  return {
    name,
    figures: listRecordingFigures(recording),
    note:
      "Of a recording, the browser compares collectives (not their causes) and the peak of memory. " +
      `For all views: shardscope report AFTER --against ${name}`,
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
        "with `shardscope report AFTER --against BEFORE`, or drop a report (.html).",
    );
  }
  throw new Error(
    `'${name}' is neither a report nor a recording of shardscope. ` +
      "Drop a report (.html) or a recording (.json, .json.gz).",
  );
}

export interface Difference {
  readonly group: string;
  readonly label: string;
  readonly unit: string;
  readonly before: number | null; // null: there is no such figure
  readonly after: number | null;
}

/** Figures of a view in both, in the page's order; groups that only the page has are left out. */
export function listDifferences(
  view: string,
  before: readonly Figure[],
  after: readonly Figure[],
): Difference[] {
  const rows = new Map<string, Difference>();
  const known = new Set(before.filter((figure) => figure.view === view).map(({ group }) => group));
  for (const [figures, side] of [
    [after, "after"],
    [before, "before"],
  ] as const) {
    for (const figure of figures) {
      if (figure.view !== view || (known.size && !known.has(figure.group))) continue;
      const { group, label, unit, value } = figure;
      const key = `${group}\n${label}`;
      const row = rows.get(key) ?? { group, label, unit, before: null, after: null };
      rows.set(key, { ...row, [side]: value });
    }
  }
  return [...rows.values()];
}

/** `+12%`, `−3%`; empty without a figure to compare with. */
export function formatChangeShare({ before, after }: Difference): string {
  if (!before || after === null || before === after) return "";
  const percent = (100 * (after - before)) / before;
  const size = Math.abs(percent);
  const digits = size < 1 ? "<1" : size < 1000 ? String(Math.round(size)) : ">999";
  return `${percent > 0 ? "+" : "−"}${digits}%`;
}
