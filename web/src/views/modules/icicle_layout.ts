/** Layout of an icicle chart: each box is below its parent, as wide as its share of it. */
import type { Modules } from "../../page";

/** A box that can be drawn; positions and widths are shares of the full width, without zoom. */
export interface IcicleNode {
  readonly id: string;
  readonly module: number; // -1 for modules that only the earlier recording has
  readonly gone: number; // position in the list of gone modules; -1 for others
  readonly depth: number;
  readonly left: number;
  readonly width: number;
  readonly size: number; // of all modules that it represents
  readonly own: number; // the part that belongs to no child
  readonly parent: IcicleNode | null;
  readonly children: readonly IcicleNode[];
}

export interface GoneBox {
  readonly parent: number;
  readonly size: number;
}

interface TreeInput {
  readonly modules: Pick<Modules, "parent" | "end">;
  readonly shown: Int32Array; // for each module, the one that represents it
  readonly sizes: ArrayLike<number>; // sums of what each shown module represents
  readonly gone?: readonly GoneBox[];
}

interface Builder extends TreeInput {
  readonly weights: Float64Array;
  readonly goneByParent: ReadonlyMap<number, readonly number[]>;
}

/**
 * Lays out all modules that are shown. A box is as wide as its figure, or as its children together
 * where they add up to more: ranks of different pipeline stages, tied parameters, a comparison.
 */
export function layoutIcicle(input: TreeInput): IcicleNode[] {
  const { gone = [] } = input;
  const goneByParent = new Map<number, number[]>();
  gone.forEach(({ parent }, i) => {
    goneByParent.set(parent, [...(goneByParent.get(parent) ?? []), i]);
  });
  const weights = measureWeights(input);
  const roots = listChildren(input, -1);
  const lostRoots = goneByParent.get(-1) ?? [];
  const total =
    roots.reduce((sum, root) => sum + weights[root]!, 0) +
    lostRoots.reduce((sum, i) => sum + gone[i]!.size, 0);
  const builder = { ...input, weights, goneByParent };
  return total > 0 ? placeSiblings(builder, null, -1, { left: 0, width: 1, total }) : [];
}

/** The weight of each shown module: its figure, or that of its children together if it is more. */
export function measureWeights({ modules, shown, sizes, gone = [] }: TreeInput): Float64Array {
  const { parent } = modules;
  const childWeights = new Float64Array(parent.length);
  const weights = new Float64Array(parent.length);
  for (const { parent: above, size } of gone) if (above >= 0) childWeights[above]! += size;
  for (let i = parent.length - 1; i >= 0; i--) {
    if (shown[i] !== i) continue;
    weights[i] = Math.max(sizes[i]!, childWeights[i]!);
    if (parent[i]! >= 0) childWeights[parent[i]!]! += weights[i]!;
  }
  return weights;
}

interface Extent {
  readonly left: number;
  readonly width: number;
  readonly total: number; // what the width stands for
}

function placeSiblings(
  builder: Builder,
  parentNode: IcicleNode | null,
  parent: number,
  { left, width, total }: Extent,
): IcicleNode[] {
  const { sizes, weights, gone = [], goneByParent } = builder;
  const depth = parentNode ? parentNode.depth + 1 : 0;
  const nodes: IcicleNode[] = [];
  let x = left;
  const place = (module: number, goneIndex: number, weight: number): void => {
    if (!weight) return;
    const children: IcicleNode[] = [];
    const size = module < 0 ? weight : sizes[module]!;
    const node = {
      id: module < 0 ? `gone-${goneIndex}` : String(module),
      module,
      gone: goneIndex,
      depth,
      left: x,
      width: (width * weight) / total,
      size,
      own: size,
      parent: parentNode,
      children,
    };
    if (module >= 0) {
      const extent = { left: x, width: node.width, total: weight };
      children.push(...placeSiblings(builder, node, module, extent));
      node.own = Math.max(size - children.reduce((sum, child) => sum + child.size, 0), 0);
    }
    nodes.push(node);
    x += node.width;
  };
  for (const child of listChildren(builder, parent)) place(child, -1, weights[child]!);
  for (const i of goneByParent.get(parent) ?? []) place(-1, i, gone[i]!.size);
  return nodes;
}

function listChildren({ modules, shown }: TreeInput, parent: number): number[] {
  const children: number[] = [];
  const end = parent < 0 ? modules.parent.length : modules.end[parent]!;
  for (let child = parent + 1; child < end; child = modules.end[child]!) {
    if (shown[child] === child) children.push(child);
  }
  return children;
}

/** The part of the full width that is visible. */
export interface Viewport {
  readonly left: number;
  readonly width: number;
}

export const FULL: Viewport = { left: 0, width: 1 };

/** A box on the screen, in pixels from the left; `node` is null for boxes that are too narrow alone. */
export interface Box {
  readonly node: IcicleNode | null;
  readonly numMerged: number; // boxes that it stands for
  readonly depth: number;
  readonly x: number;
  readonly width: number;
}

const MIN_PIXELS = 2;

/** Boxes in the viewport; adjacent boxes that are too narrow are merged into one without a node. */
export function listBoxes(
  roots: readonly IcicleNode[],
  viewport: Viewport,
  pixels: number,
  maxDepth: number,
): Box[] {
  const boxes: Box[] = [];
  const scale = pixels / viewport.width;
  const addSiblings = (nodes: readonly IcicleNode[]): void => {
    let run: Box | null = null; // of boxes that are too narrow
    for (const node of nodes) {
      const start = (node.left - viewport.left) * scale;
      const end = start + node.width * scale;
      const x = Math.max(start, 0);
      const width = Math.min(end, pixels) - x;
      if (width <= 0) continue;
      if (end - start >= MIN_PIXELS) {
        run = null;
        boxes.push({ node, numMerged: 1, depth: node.depth, x, width });
        if (node.depth + 1 < maxDepth) addSiblings(node.children);
        continue;
      }
      if (run) boxes.splice(boxes.indexOf(run), 1);
      const first: number = run ? run.x : x;
      const numMerged: number = run ? run.numMerged + 1 : 1;
      run = { node: null, numMerged, depth: node.depth, x: first, width: x + width - first };
      boxes.push(run);
    }
  };
  addSiblings(roots);
  return boxes;
}

/** The viewport in which a module has the full width; all of it if the module is not drawn. */
export function findViewport(node: IcicleNode | null): Viewport {
  return node ? { left: node.left, width: node.width } : FULL;
}

export function findNode(roots: readonly IcicleNode[], id: string): IcicleNode | null {
  for (const node of roots) {
    const match = node.id === id ? node : findNode(node.children, id);
    if (match) return match;
  }
  return null;
}

/** The box at a point, or null. */
export function findBoxAt(boxes: readonly Box[], x: number, depth: number): Box | null {
  return boxes.find((box) => box.depth === depth && x >= box.x && x < box.x + box.width) ?? null;
}

/** The box that an arrow key moves to: beside, above or below it; null if there is none. */
export function moveByKey(
  boxes: readonly Box[],
  active: IcicleNode | null,
  key: string,
): IcicleNode | null {
  const drawn = boxes.filter((box) => box.node);
  const first = drawn[0]?.node ?? null;
  if (key === "Home" || (!active && key.startsWith("Arrow"))) return first;
  if (!active) return null;
  const row = drawn.filter(({ depth }) => depth === active.depth).sort((a, b) => a.x - b.x);
  const index = row.findIndex(({ node }) => node?.id === active.id);
  const isDrawn = (node: IcicleNode): boolean => drawn.some((box) => box.node?.id === node.id);
  if (key === "ArrowLeft") return row[index - 1]?.node ?? null;
  if (key === "ArrowRight") return row[index + 1]?.node ?? null;
  if (key === "ArrowUp") return active.parent;
  if (key === "ArrowDown") {
    // The largest child, since that is where most of the parent goes.
    const children = active.children.filter(isDrawn);
    return children.length ? children.reduce((a, b) => (b.width > a.width ? b : a)) : null;
  }
  return null;
}
