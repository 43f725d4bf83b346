/**
 * What is selected in all views: a module, an axis, a kind, a phase, a cause, a source line, a
 * dtype, a rank, a training step, a range of collectives. It is kept in the address, so the back
 * button undoes it.
 */
import { computed } from "@preact/signals";
import type { Communication } from "../page";
import { type KnownNames, knownNames } from "./known_names";
import { hasModuleSelection, isInSelection, judgeModule } from "./modules";
import { page } from "./page";
import { includesRank } from "./ranks";
import { changeRoute, hrefTo, navigate, route, SELECTION_PARAMS } from "./route";

export type Facet = keyof typeof SELECTION_PARAMS;

export const FACETS = Object.keys(SELECTION_PARAMS) as readonly Facet[];

/** The name of a facet. Where only forward passes are known, they are what `step` selects. */
export function nameFacet(facet: Facet): string {
  const isForward = facet === "step" && page.value.communication?.step_word === "forward";
  return isForward ? "forward pass" : facet;
}

/** Collectives between two positions: in the order of issue, or in nanoseconds. */
export interface CallRange {
  readonly along: "order" | "time";
  readonly low: number;
  readonly high: number;
}

/** Positions in the page's known names; -1, an empty text or null select everything. */
export interface Selection {
  readonly axis: number;
  readonly kind: number;
  readonly phase: number;
  readonly cause: number;
  readonly dtype: number;
  readonly line: string; // `models/llama.py:121`
  readonly rank: number;
  readonly step: number; // from 1
  readonly range: CallRange | null;
}

export function paramOf(facet: Facet): string {
  return SELECTION_PARAMS[facet];
}

/** The names of a facet, or a function that says why a text is none of its values. */
export function listKnown(facet: Facet): readonly string[] | ((text: string) => string) {
  const known = {
    ...knownNames.value,
    module: judgeModule,
    line: (text: string) => (locations.value.has(text) ? "" : "no line of this recording"),
    rank: (text: string) => (parseRank(text) >= 0 ? "" : judgeRank(text)),
    step: (text: string) => (parseStep(text) > 0 ? "" : judgeStep(text)),
    range: judgeRange,
  };
  return known[facet];
}

function judgeRange(text: string): string {
  if (!page.value.communication) return "this page has no collectives";
  return parseRange(text) ? "" : "a range is FIRST-LAST or FIRST-LASTns";
}

function parseRank(text: string): number {
  return /^\d+$/.test(text) && Number(text) < page.value.run.world_size ? Number(text) : -1;
}

function judgeRank(text: string): string {
  const last = page.value.run.world_size - 1;
  return /^\d+$/.test(text) && last >= 0 ? `ranks are 0 to ${last}` : "a rank is a number";
}

/** The most steps of collectives, or of compared tensors. */
export const numSteps = computed(() => {
  const { communication, proof } = page.value;
  const steps = proof?.parity.flatMap(({ tensors }) => tensors.step) ?? [];
  return steps.reduce((a, b) => Math.max(a, b), communication?.num_steps ?? 0);
});

function parseStep(text: string): number {
  const step = /^\d+$/.test(text) ? Number(text) : 0;
  return step > 0 && step <= numSteps.value ? step : -1;
}

function judgeStep(text: string): string {
  if (!numSteps.value) return "nothing on this page has several steps";
  return /^\d+$/.test(text) ? `steps are 1 to ${numSteps.value}` : "a step is a number";
}

/** The selection, without the module, which store/modules.ts reads. */
export const selection = computed<Selection>(() => {
  const { params } = route.value;
  const communication = page.value.communication;
  const find = (facet: keyof KnownNames): number => {
    const name = params[SELECTION_PARAMS[facet]];
    return name === undefined ? -1 : knownNames.value[facet].indexOf(name);
  };
  return {
    axis: find("axis"),
    kind: find("kind"),
    phase: find("phase"),
    cause: find("cause"),
    dtype: find("dtype"),
    line: locations.value.has(params.line ?? "") ? params.line! : "",
    rank: parseRank(params.rank ?? ""),
    step: parseStep(params.step ?? ""),
    range: communication ? parseRange(params.range) : null,
  };
});

/** `10-20` is by order, `10-20ns` by time. */
function parseRange(text: string | undefined): CallRange | null {
  const match = /^(\d+)-(\d+)(ns)?$/.exec(text ?? "");
  if (!match || Number(match[1]) > Number(match[2])) return null;
  return { along: match[3] ? "time" : "order", low: Number(match[1]), high: Number(match[2]) };
}

/** The text of a range in the address: its collectives are those inside of it. */
export function formatRange({ along, low, high }: CallRange): string {
  const first = Math.max(Math.ceil(low), 0);
  return `${first}-${Math.max(Math.floor(high), first)}${along === "time" ? "ns" : ""}`;
}

/** Facets that select something. */
export const selectedFacets = computed<readonly Facet[]>(() => {
  const facets = selection.value;
  const isSelected = (facet: Facet): boolean => {
    if (facet === "module") return hasModuleSelection.value;
    if (facet === "line") return facets.line !== "";
    return facet === "range" ? facets.range !== null : facets[facet] >= 0;
  };
  return FACETS.filter(isSelected);
});

/** Selected facets that are not among these. */
export function listUnfollowed(follows: readonly Facet[]): readonly Facet[] {
  return selectedFacets.value.filter((facet) => !follows.includes(facet));
}

/** The text of a facet in the address: a name, `file:line`, a number, or a range. */
export function selectedText(facet: Facet): string {
  return route.value.params[SELECTION_PARAMS[facet]] ?? "";
}

/** The selected axis, kind, phase, cause or dtype; null if all are. */
export function selectedFacetName(facet: keyof KnownNames): string | null {
  return selection.value[facet] < 0 ? null : selectedText(facet);
}

/** Address of the current view with these values selected; null selects all values of a facet. */
export function selectionHref(
  changes: Readonly<Partial<Record<Facet, string | null>>>,
  view = route.value.view,
): string {
  return hrefTo(view, toParams(changes));
}

/** Selects a value of a facet in every view; null selects all. */
export function select(facet: Facet, value: string | null): void {
  selectAll({ [facet]: value });
}

export function selectAll(changes: Readonly<Partial<Record<Facet, string | null>>>): void {
  navigate(changeRoute(route.value, route.value.view, toParams(changes)));
}

export function clear(...facets: readonly Facet[]): void {
  selectAll(Object.fromEntries(facets.map((facet) => [facet, null])));
}

function toParams(
  changes: Readonly<Partial<Record<Facet, string | null>>>,
): Record<string, string | null> {
  return Object.fromEntries(
    Object.entries(changes).map(([facet, value]) => [SELECTION_PARAMS[facet as Facet], value]),
  );
}

/** `models/llama.py:121`; empty for no line. */
export function formatLocation(source: number): string {
  const { file, line } = page.value.sources;
  return source < 0 || file[source] === undefined ? "" : `${file[source]}:${line[source]}`;
}

const locations = computed(() => {
  const { line } = page.value.sources;
  return new Set(line.map((_, source) => formatLocation(source)));
});

/** For each source, 1 if it is on the selected line; null if no line is selected. */
const selectedSources = computed<Uint8Array | null>(() => {
  const { line } = selection.value;
  if (!line) return null;
  return Uint8Array.from(page.value.sources.line, (_, source) =>
    Number(formatLocation(source) === line),
  );
});

/** Whether a source is on the selected line; true if no line is selected. */
export function isSourceSelected(source: number): boolean {
  return !selectedSources.value || selectedSources.value[source] === 1;
}

/** Whether ranks, as Python formats them, include the selected rank; no ranks stand for all. */
export function isRankSelected(ranks: string): boolean {
  const { rank } = selection.value;
  return rank < 0 || !/\d/.test(ranks) || includesRank(ranks, rank);
}

/** Whether a step, 0 for none, is the selected one; true if none is selected. */
export function isStepSelected(step: number): boolean {
  return selection.value.step < 0 || selection.value.step === step;
}

/** Position of the set of identical ranks that includes the selected rank; -1 is none. */
export const selectedRankSet = computed(() => {
  const { rank } = selection.value;
  if (rank < 0) return -1;
  return page.value.communication?.ranks.findIndex(({ ranks }) => includesRank(ranks, rank)) ?? -1;
});

type FacetColumns = Pick<
  Communication["traffic"],
  "axis" | "kind" | "phase" | "owner" | "cause" | "source" | "dtype" | "step"
>;

/** Whether a row of collectives is selected, by all facets but rank, range and those ignored. */
export function makeRowFilter(
  columns: FacetColumns,
  ignored: readonly Facet[] = [],
): (row: number) => boolean {
  const facets = selection.value;
  const tests: ((row: number) => boolean)[] = [];
  for (const facet of ["axis", "kind", "phase", "cause", "dtype", "step"] as const) {
    const value = facets[facet];
    const column = columns[facet];
    if (value >= 0 && !ignored.includes(facet)) tests.push((row) => column[row] === value);
  }
  if (facets.line && !ignored.includes("line")) {
    tests.push((row) => isSourceSelected(columns.source[row]!));
  }
  if (hasModuleSelection.value && !ignored.includes("module")) {
    tests.push((row) => isInSelection(columns.owner[row]!));
  }
  return (row) => tests.every((isMatch) => isMatch(row));
}

/** Whether each of the page's calls is selected, as 1 or 0. */
export const selectedCalls = computed<Uint8Array>(() => {
  const calls = page.value.communication!.calls;
  const { rank, range } = selection.value;
  const isSelected = makeRowFilter(calls);
  const positions = range?.along === "time" ? calls.start_ns : calls.order;
  const listedRank = listedRankOf(rank);
  return Uint8Array.from(calls.rank, (callRank, row) =>
    Number(
      (rank < 0 || callRank === listedRank) &&
        (!range || isInRange(positions[row], range)) &&
        isSelected(row),
    ),
  );
});

export function isInRange(position: number | undefined, { low, high }: CallRange): boolean {
  return position !== undefined && position >= low && position <= high;
}

/** The rank whose calls are listed for a rank: itself, or one that issued the same collectives. */
export function listedRankOf(rank: number): number {
  const communication = page.value.communication;
  if (!communication || listedRanks.value.has(rank)) return rank;
  return communication.ranks.find(({ ranks }) => includesRank(ranks, rank))?.example ?? rank;
}

const listedRanks = computed(() => new Set(page.value.communication?.calls.rank));
