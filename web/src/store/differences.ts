/** Figures of two recordings, side by side. */
import type { Figure } from "../page";

export interface Difference {
  readonly group: string;
  readonly label: string;
  readonly unit: string;
  readonly before: number | null; // null: there is no such figure
  readonly after: number | null;
}

/**
 * Figures in both, in the page's order. Groups that only the page has are left out, unless they divide
 * a group of both: a recording without findings has none of any rule (`findings by rule`).
 */
export function listDifferences(before: readonly Figure[], after: readonly Figure[]): Difference[] {
  const rows = new Map<string, Difference>();
  const known = [...new Set(before.map(({ group }) => group))];
  const isKnown = (group: string): boolean => known.some((prefix) => group.startsWith(prefix));
  for (const [figures, side] of [
    [after, "after"],
    [before, "before"],
  ] as const) {
    for (const { group, label, unit, value } of figures) {
      if (known.length && !isKnown(group)) continue;
      const key = `${group}\n${label}`;
      const row = rows.get(key) ?? { group, label, unit, before: null, after: null };
      rows.set(key, { ...row, [side]: value });
    }
  }
  return [...rows.values()];
}

/** Whether nothing changed; what a recording has no figure of, it has none of. */
export function isSame({ before, after }: Difference): boolean {
  return (before ?? 0) === (after ?? 0);
}

/** `+12%`, `−3%`; empty without a figure to compare with. */
export function formatChangeShare({ before, after }: Difference): string {
  if (!before || after === null || before === after) return "";
  const percent = (100 * (after - before)) / before;
  const size = Math.abs(percent);
  const digits = size < 1 ? "<1" : size < 1000 ? String(Math.round(size)) : ">999";
  return `${percent > 0 ? "+" : "−"}${digits}%`;
}
