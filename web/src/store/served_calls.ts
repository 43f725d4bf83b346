/**
 * Collectives that stay with `shardscope serve`, which sends the rows of the table that are in
 * sight. Filters and rows are positions in the page's lists of names.
 */
import { computed, signal } from "@preact/signals";
import type { Calls } from "../page";
import { hasModuleSelection, isInSelection, moduleName } from "./modules";
import { page } from "./page";
import { containsWords, words } from "./search";
import { formatLocation, isSourceSelected, selection } from "./selection";

export type CallColumn = keyof Calls;

/** Ranges of values, ends included. */
export type Ranges = readonly (readonly [number, number])[];

/** One of the columns must be in one of its ranges. */
export type CallFilter = Readonly<Partial<Record<CallColumn, Ranges>>>;

export interface CallOrder {
  readonly sort: CallColumn | null; // null: by rank, then in the order of issue
  readonly is_descending: boolean;
  readonly filters: readonly CallFilter[];
}

interface CallWindow {
  readonly num_rows: number;
  readonly offset: number;
  readonly calls: Calls;
}

const WINDOW_ROWS = 500;
const ENDED = "The server does not answer. Start `shardscope serve` again, and open its address.";

/** Positions that pass a test, as ranges. */
export function findRanges(length: number, isMatch: (position: number) => boolean): Ranges {
  const ranges: [number, number][] = [];
  for (let position = 0; position < length; position++) {
    if (!isMatch(position)) continue;
    const last = ranges.at(-1);
    if (last && last[1] === position - 1) last[1] = position;
    else ranges.push([position, position]);
  }
  return ranges;
}

/** What is selected and searched for, as filters. */
export const servedFilters = computed<readonly CallFilter[]>(() => {
  const { modules, sources } = page.value;
  const filters: CallFilter[] = [];
  const { line, range, ...positions } = selection.value;
  for (const [column, value] of Object.entries(positions)) {
    if (value >= 0) filters.push({ [column]: [[value, value]] });
  }
  if (line) filters.push({ source: findRanges(sources.line.length, isSourceSelected) });
  if (hasModuleSelection.value) {
    filters.push({ owner: findRanges(modules.path.length, isInSelection) });
  }
  if (range) {
    const column = range.along === "time" ? "start_ns" : "order";
    filters.push({ [column]: [[Math.ceil(range.low), Math.floor(range.high)]] });
  }
  return [...filters, ...words.value.map(findWord)];
});

/** Rows in which a column has the word. */
function findWord(word: string): CallFilter {
  const { modules, sources } = page.value;
  const { axes, kinds, phases, causes, dtypes, groups } = page.value.communication!;
  const find = (length: number, read: (position: number) => string): Ranges =>
    findRanges(length, (position) => containsWords(read(position), [word]));
  const inNames = (names: readonly string[]): Ranges =>
    find(names.length, (position) => names[position]!);
  const inModules = find(modules.path.length, moduleName);
  return {
    kind: inNames(kinds),
    axis: inNames(axes),
    phase: inNames(phases),
    cause: inNames(causes),
    dtype: inNames(dtypes),
    group: inNames(groups.map(({ name }) => name)),
    owner: inModules,
    trigger: inModules,
    source: find(sources.line.length, formatLocation),
  };
}

type FetchRows = (request: CallOrder & { offset: number; limit: number }) => Promise<CallWindow>;

async function fetchRows(request: Parameters<FetchRows>[0]): Promise<CallWindow> {
  const answer = await fetch("/calls", { method: "POST", body: JSON.stringify(request) });
  if (!answer.ok) throw new Error(await answer.text());
  return (await answer.json()) as CallWindow;
}

/** The rows of one order. Its columns have holes where rows have not arrived. */
export class ServedRows {
  readonly columns: Record<CallColumn, number[]>;
  readonly numRows = signal(0);
  readonly numArrived = signal(0); // of windows; what draws rows reads it
  readonly error = signal("");
  private readonly asked = new Set<number>();
  private wanted: readonly number[] = [0];
  private isBusy = false;

  constructor(
    private readonly order: CallOrder,
    private readonly fetchWindow: FetchRows = fetchRows,
  ) {
    const names = Object.keys(page.value.communication!.calls) as CallColumn[];
    this.columns = Object.fromEntries(names.map((name) => [name, []])) as unknown as Record<
      CallColumn,
      number[]
    >;
    void this.work();
  }

  hasRow(row: number): boolean {
    return this.columns.rank[row] !== undefined;
  }

  /** Asks for rows that are in sight, then for the next ones; what is out of sight is skipped. */
  show(first: number, end: number): void {
    const windows: number[] = [];
    for (let at = Math.floor(first / WINDOW_ROWS); at * WINDOW_ROWS < end; at++) windows.push(at);
    const isNew = windows.length > 0 && windows[0] !== this.wanted[0];
    const isUp = isNew && windows[0]! < this.wanted[0]!;
    const next = isUp ? windows[0]! - 1 : (windows.at(-1) ?? 0) + 1;
    const hasNext = next >= 0 && next * WINDOW_ROWS < this.numRows.value;
    this.wanted = hasNext ? [...windows, next] : windows;
    void this.work();
  }

  private async work(): Promise<void> {
    if (this.isBusy) return;
    this.isBusy = true;
    for (;;) {
      const next = this.wanted.find((at) => !this.asked.has(at));
      if (next === undefined) break;
      this.asked.add(next);
      try {
        this.keep(
          await this.fetchWindow({
            ...this.order,
            offset: next * WINDOW_ROWS,
            limit: WINDOW_ROWS,
          }),
        );
        this.error.value = "";
      } catch (error) {
        this.asked.delete(next);
        this.error.value = error instanceof TypeError ? ENDED : String(error);
        break;
      }
    }
    this.isBusy = false;
  }

  private keep({ num_rows, offset, calls }: CallWindow): void {
    for (const [name, values] of Object.entries(calls) as [CallColumn, readonly number[]][]) {
      const column = this.columns[name];
      values.forEach((value, row) => {
        column[offset + row] = value;
      });
    }
    this.numRows.value = num_rows;
    this.numArrived.value += 1;
  }
}
