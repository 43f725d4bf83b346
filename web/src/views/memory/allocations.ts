/** What is in use at an instant, and what was allocated and freed between two, by group. */
import type { Allocations } from "../../page";

/** An instant is the number of an event, and stands for what is in use after the event. */
export interface Instants {
  readonly at: number;
  readonly from: number | null; // an earlier one to compare with
}

export interface Group {
  readonly key: number; // of the group: a module, a line, a phase, a row
  readonly row: number; // the first row of it
  count: number; // allocations in use at the instant
  numBytes: number; // in use at the instant
  readonly bytesByKind: number[]; // likewise
  beforeBytes: number; // in use at the earlier instant
  allocatedBytes: number; // between the two
  freedBytes: number;
}

export function isInUse(table: Allocations, row: number, instant: number): boolean {
  return table.start[row]! <= instant && instant < table.end[row]!;
}

/** Whether an event is after the first instant and not after the second. */
function isBetween(event: number, first: number, second: number): boolean {
  return first < event && event <= second;
}

/**
 * Sums of the groups that have anything at these instants, the most bytes first; with two instants,
 * the largest change first. Parts of one allocation in a group count once.
 */
export function sumGroups(
  table: Allocations,
  { at, from }: Instants,
  keyOf: (row: number) => number,
  isShown: (row: number) => boolean = () => true,
): Group[] {
  const groups = new Map<number, Group>();
  const lastStarts = new Map<number, number>();
  table.start.forEach((start, row) => {
    if (start > at || table.end[row]! <= (from ?? at) || !isShown(row)) return;
    const key = keyOf(row);
    let group = groups.get(key);
    if (!group) {
      group = makeGroup(key, row);
      groups.set(key, group);
    }
    const numBytes = table.num_bytes[row]!;
    if (isInUse(table, row, at)) {
      group.numBytes += numBytes;
      const kind = table.kind[row]!;
      group.bytesByKind[kind] = (group.bytesByKind[kind] ?? 0) + numBytes;
      if (lastStarts.get(key) !== start) group.count++;
      lastStarts.set(key, start);
    }
    if (from === null) return;
    if (isInUse(table, row, from)) group.beforeBytes += numBytes;
    if (isBetween(start, from, at)) group.allocatedBytes += numBytes;
    if (isBetween(table.end[row]!, from, at)) group.freedBytes += numBytes;
  });
  const size = (group: Group): number =>
    from === null ? group.numBytes : Math.abs(group.numBytes - group.beforeBytes);
  return [...groups.values()].sort((a, b) => size(b) - size(a) || a.row - b.row);
}

function makeGroup(key: number, row: number): Group {
  return {
    key,
    row,
    count: 0,
    numBytes: 0,
    bytesByKind: [],
    beforeBytes: 0,
    allocatedBytes: 0,
    freedBytes: 0,
  };
}

/** The nearest event to an instant that changes memory, in one direction; null if there is none. */
export function findEvent(table: Allocations, instant: number, direction: 1 | -1): number | null {
  let nearest: number | null = null;
  for (const events of [table.start, table.end]) {
    for (const event of events) {
      if (event < table.first || event > table.last) continue;
      if ((event - instant) * direction <= 0) continue;
      if (nearest === null || Math.abs(event - instant) < Math.abs(nearest - instant)) {
        nearest = event;
      }
    }
  }
  return nearest;
}
