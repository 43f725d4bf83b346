/** Ops of a graph under the source lines that they come from, in the order of the graph. */
import type { GraphItem } from "../../page";

export interface LineOfOps {
  readonly line: number; // position in sources; -1 is none
  readonly ops: readonly number[];
}

/** Consecutive ops of one line are together; a line that a loop runs again comes again. */
export function groupByLine(graph: GraphItem, isShown: (op: number) => boolean): LineOfOps[] {
  const groups: { line: number; ops: number[] }[] = [];
  graph.op.forEach((_, op) => {
    if (!isShown(op)) return;
    const line = graph.line[op] ?? -1;
    const last = groups.at(-1);
    if (last?.line === line) last.ops.push(op);
    else groups.push({ line, ops: [op] });
  });
  return groups;
}
