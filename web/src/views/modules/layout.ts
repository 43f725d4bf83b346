/** Where the boxes of an icicle lie: below their parent, as wide as their share of it. */
import type { Modules } from "../../page";

export interface Box {
  readonly module: number;
  readonly depth: number;
  readonly left: number; // share of the whole width
  readonly width: number;
  readonly value: number; // with all that are folded into it or into what is above it
  readonly own: number; // of it, what no child has
}

interface Wanted {
  readonly modules: Modules;
  readonly sizeOf: (position: number) => number;
  readonly zoomed: number; // module that has the whole width; -1 shows all roots
  readonly isFolded: (position: number) => boolean; // left out, since another stands for it
  readonly minWidth: number; // narrower ones would not be seen
  readonly maxDepth: number;
}

interface Task {
  readonly positions: readonly number[];
  readonly depth: number;
  readonly left: number;
  readonly width: number;
  readonly value: number;
  readonly times: number;
}

export function layOut(wanted: Wanted): Box[] {
  const { modules, zoomed, sizeOf } = wanted;
  const boxes: Box[] = [];
  let times = 1;
  for (const module of listAbove(modules, zoomed)) {
    times *= timesOf(wanted, module);
    const value = sizeOf(module) * times;
    boxes.push({ module, depth: boxes.length, left: 0, width: 1, value, own: 0 });
  }
  const positions = zoomed >= 0 ? [zoomed] : listChildren(modules, -1, wanted.isFolded);
  const value = sumSizes(wanted, positions, times);
  const tasks: Task[] = [{ positions, depth: boxes.length, left: 0, width: 1, value, times }];
  for (let task = tasks.pop(); task; task = tasks.pop()) layOutSiblings(task, wanted, boxes, tasks);
  return boxes;
}

function sumSizes(wanted: Wanted, positions: readonly number[], times: number): number {
  const sizes = positions.map((one) => wanted.sizeOf(one) * timesOf(wanted, one));
  return times * sizes.reduce((sum, size) => sum + size, 0);
}

function layOutSiblings(task: Task, wanted: Wanted, boxes: Box[], tasks: Task[]): void {
  let left = task.left;
  for (const module of task.positions) {
    const times = task.times * timesOf(wanted, module);
    const value = wanted.sizeOf(module) * times;
    const width = task.value > 0 ? (task.width * value) / task.value : 0;
    if (width < wanted.minWidth) continue;
    const positions = listChildren(wanted.modules, module, wanted.isFolded);
    const inside = sumSizes(wanted, positions, times);
    boxes.push({ module, depth: task.depth, left, width, value, own: Math.max(value - inside, 0) });
    if (task.depth + 1 < wanted.maxDepth && positions.length) {
      // Tied parameters are in several children but once in their parent.
      tasks.push({
        positions,
        depth: task.depth + 1,
        left,
        width,
        value: Math.max(value, inside),
        times,
      });
    }
    left += width;
  }
}

function timesOf({ modules, isFolded }: Wanted, position: number): number {
  const repeat = modules.repeat[position] ?? 1;
  return repeat > 1 && isFoldedGroup(modules, position, isFolded) ? repeat : 1;
}

/** Whether its likes are hidden: the next sibling of a folded group is none of them, or hidden. */
function isFoldedGroup(
  modules: Modules,
  position: number,
  isFolded: (position: number) => boolean,
): boolean {
  for (let at = modules.end[position]!; modules.parent[at] === modules.parent[position]; ) {
    if (modules.alike[at] === position) return isFolded(at);
    at = modules.end[at]!;
  }
  return false;
}

function listAbove(modules: Modules, position: number): number[] {
  const found: number[] = [];
  for (let at = modules.parent[position] ?? -1; at >= 0; at = modules.parent[at]!)
    found.unshift(at);
  return found;
}

function listChildren(
  modules: Modules,
  parent: number,
  isFolded: (position: number) => boolean,
): number[] {
  const found: number[] = [];
  const end = parent < 0 ? modules.path.length : modules.end[parent]!;
  for (let at = parent + 1; at < end; at = modules.end[at]!) {
    if (!isFolded(at)) found.push(at);
  }
  return found;
}
