/** Layout of an icicle chart: each box is below its parent, as wide as its share of it. */
import type { Modules } from "../../page";

export interface Box {
  readonly module: number;
  readonly depth: number;
  readonly left: number; // share of the full width
  readonly width: number;
  readonly value: number; // including layers that are folded into it or into an ancestor
  readonly own: number; // the part that belongs to no child
}

interface IcicleInput {
  readonly modules: Modules;
  readonly sizeOf: (position: number) => number;
  readonly zoomed: number; // module that has the full width; -1 shows all roots
  readonly isFolded: (position: number) => boolean; // hidden, since an identical sibling represents it
  readonly minWidth: number; // narrower boxes are left out
  readonly maxDepth: number;
}

interface SiblingsTask {
  readonly positions: readonly number[];
  readonly depth: number;
  readonly left: number;
  readonly width: number;
  readonly value: number;
  readonly numRepeats: number;
}

export function layoutIcicle(input: IcicleInput): Box[] {
  const { modules, zoomed, sizeOf } = input;
  const boxes: Box[] = [];
  let numRepeats = 1;
  for (const module of listAncestors(modules, zoomed)) {
    numRepeats *= countRepeats(input, module);
    const value = sizeOf(module) * numRepeats;
    boxes.push({ module, depth: boxes.length, left: 0, width: 1, value, own: 0 });
  }
  const positions = zoomed >= 0 ? [zoomed] : listChildren(modules, -1, input.isFolded);
  const value = sumSizes(input, positions, numRepeats);
  const tasks: SiblingsTask[] = [
    { positions, depth: boxes.length, left: 0, width: 1, value, numRepeats },
  ];
  for (let task = tasks.pop(); task; task = tasks.pop()) layoutSiblings(task, input, boxes, tasks);
  return boxes;
}

function sumSizes(input: IcicleInput, positions: readonly number[], numRepeats: number): number {
  const sizes = positions.map((position) => input.sizeOf(position) * countRepeats(input, position));
  return numRepeats * sizes.reduce((sum, size) => sum + size, 0);
}

function layoutSiblings(
  task: SiblingsTask,
  input: IcicleInput,
  boxes: Box[],
  tasks: SiblingsTask[],
): void {
  let left = task.left;
  for (const module of task.positions) {
    const numRepeats = task.numRepeats * countRepeats(input, module);
    const value = input.sizeOf(module) * numRepeats;
    const width = task.value > 0 ? (task.width * value) / task.value : 0;
    if (width < input.minWidth) continue;
    const positions = listChildren(input.modules, module, input.isFolded);
    const childrenValue = sumSizes(input, positions, numRepeats);
    boxes.push({
      module,
      depth: task.depth,
      left,
      width,
      value,
      own: Math.max(value - childrenValue, 0),
    });
    if (task.depth + 1 < input.maxDepth && positions.length) {
      // Tied parameters count in several children, but once in their parent.
      tasks.push({
        positions,
        depth: task.depth + 1,
        left,
        width,
        value: Math.max(value, childrenValue),
        numRepeats,
      });
    }
    left += width;
  }
}

function countRepeats({ modules, isFolded }: IcicleInput, position: number): number {
  const repeat = modules.repeat[position] ?? 1;
  return repeat > 1 && isFirstOfFolded(modules, position, isFolded) ? repeat : 1;
}

/** Whether the identical siblings of this module are hidden. */
function isFirstOfFolded(
  modules: Modules,
  position: number,
  isFolded: (position: number) => boolean,
): boolean {
  for (
    let sibling = modules.end[position]!;
    modules.parent[sibling] === modules.parent[position];
  ) {
    if (modules.first_identical[sibling] === position) return isFolded(sibling);
    sibling = modules.end[sibling]!;
  }
  return false;
}

function listAncestors(modules: Modules, position: number): number[] {
  const ancestors: number[] = [];
  for (
    let ancestor = modules.parent[position] ?? -1;
    ancestor >= 0;
    ancestor = modules.parent[ancestor]!
  )
    ancestors.unshift(ancestor);
  return ancestors;
}

function listChildren(
  modules: Modules,
  parent: number,
  isFolded: (position: number) => boolean,
): number[] {
  const children: number[] = [];
  const end = parent < 0 ? modules.path.length : modules.end[parent]!;
  for (let child = parent + 1; child < end; child = modules.end[child]!) {
    if (!isFolded(child)) children.push(child);
  }
  return children;
}
