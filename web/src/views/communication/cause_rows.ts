/** The causes of collectives, by what they led to. */
import { computed } from "@preact/signals";
import type { Communication, Traffic } from "../../page";
import { page } from "../../store/page";
import {
  groupRows,
  NO_TRAFFIC,
  sumRows,
  type TrafficColumn,
  type TrafficGroup,
  type TrafficSum,
  trafficRows,
} from "../../store/traffic";

export interface CauseRow extends TrafficSum {
  readonly key: string;
  readonly cause: number; // position in Communication.causes
  readonly kind: string;
  readonly axis: string;
  readonly what: string; // `all_gather[tp]`
  readonly isImplicit: boolean;
  readonly source: number; // of the first of its collectives that has one
  readonly modules: readonly number[]; // in order of issue
}

const COLUMNS: readonly TrafficColumn[] = ["cause", "kind", "axis"];

/** A row for each cause, kind and axis of the page, the most expensive first. */
export const causeRows = computed(() => listCauses(page.value.communication!));

export function listCauses(communication: Communication): CauseRow[] {
  const { causes, kinds, axes, implicit_causes, traffic } = communication;
  const nameOf = ({ cause, what }: CauseRow): string => `${causes[cause]}\n${what}`;
  return groupRows(traffic, COLUMNS, (row) => traffic.cause[row]! >= 0)
    .map((group) => {
      const [cause, kind, axis] = group.values as [number, number, number];
      return {
        ...describeGroup(traffic, group),
        key: group.values.join(),
        cause,
        kind: kinds[kind]!,
        axis: axes[axis]!,
        what: `${kinds[kind]}[${axes[axis]}]`,
        isImplicit: implicit_causes.includes(cause),
      };
    })
    .sort((a, b) => b.wire_bytes - a.wire_bytes || (nameOf(a) < nameOf(b) ? -1 : 1));
}

/** Figures, source line and modules of the collectives of a group. */
function describeGroup(traffic: Traffic, { rows, values: _, ...sum }: TrafficGroup) {
  return {
    ...sum,
    source: rows.map((row) => traffic.source[row]!).find((source) => source >= 0) ?? -1,
    modules: [...new Set(rows.map((row) => traffic.owner[row]!))],
  };
}

/** The rows of `causeRows`, in their order, with what is selected of them; a count of 0 if nothing is. */
export const selectedCauses = computed<readonly CauseRow[]>(() => {
  const groups = new Map(sumRows(COLUMNS).map((group) => [group.values.join(), group]));
  return causeRows.value.map((row) => {
    const group = groups.get(row.key);
    return group
      ? { ...row, ...describeGroup(trafficRows.value, group) }
      : { ...row, ...NO_TRAFFIC, source: -1, modules: [] };
  });
});

const MAX_LETTERS = 44;

/** `call of …PipelineSchedule.step`: the last parts of a long name that fit, at least one. */
export function shortenCause(words: string): string {
  const [, what, name] = /^(call of )(\S+)$/.exec(words) ?? [];
  if (!name || words.length <= MAX_LETTERS) return words;
  const parts = name.split(".");
  let first = parts.length - 1;
  while (first > 0 && `${what}…${parts.slice(first - 1).join(".")}`.length <= MAX_LETTERS) first--;
  return `${what}…${parts.slice(first).join(".")}`;
}
