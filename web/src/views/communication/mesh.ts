/** Where a rank is on the mesh. */
import type { Axis } from "../../page";

/** `dp 1, tp 3`; empty where the mesh is not of all ranks, since it may then be of any of them. */
export function placeOfRank(rank: number, mesh: readonly Axis[], worldSize: number): string {
  if (!isNumbered(mesh, worldSize)) return "";
  let rest = rank;
  const places = mesh.toReversed().map(({ name, size }) => {
    const place = rest % size;
    rest = Math.floor(rest / size);
    return `${name} ${place}`;
  });
  return places.reverse().join(", ");
}

function isNumbered(mesh: readonly Axis[], worldSize: number): boolean {
  return mesh.length > 0 && mesh.reduce((product, { size }) => product * size, 1) === worldSize;
}

/** How many ranks in a row belong together: those that differ along the last axis alone. */
export function blockOf(mesh: readonly Axis[], worldSize: number): number {
  const last = mesh.at(-1)?.size ?? 0;
  return isNumbered(mesh, worldSize) && mesh.length > 1 ? last : 0;
}

/** Which labels of a row have room: each, each second, each fourth … */
export function labelStep(numLabels: number, pixelsEach: number, pixelsNeeded: number): number {
  let step = 1;
  while (step * pixelsEach < pixelsNeeded && step < numLabels) step *= 2;
  return step;
}
