/** Mesh coordinates of ranks. */
import type { Axis } from "../../page";

/** `dp 1, tp 3`; empty if the mesh does not cover all ranks, since it may then be any subset. */
export function formatCoordinate(rank: number, mesh: readonly Axis[], worldSize: number): string {
  if (!coversWorld(mesh, worldSize)) return "";
  let rest = rank;
  const coordinates = mesh.toReversed().map(({ name, size }) => {
    const index = rest % size;
    rest = Math.floor(rest / size);
    return `${name} ${index}`;
  });
  return coordinates.reverse().join(", ");
}

function coversWorld(mesh: readonly Axis[], worldSize: number): boolean {
  return mesh.length > 0 && mesh.reduce((product, { size }) => product * size, 1) === worldSize;
}

/** Size of the last axis: consecutive ranks that differ only along it are drawn as a block; 0 is none. */
export function countInnermostRanks(mesh: readonly Axis[], worldSize: number): number {
  const last = mesh.at(-1)?.size ?? 0;
  return coversWorld(mesh, worldSize) && mesh.length > 1 ? last : 0;
}

/** Step between labels that have room: every, every second, every fourth … */
export function labelStep(numLabels: number, pixelsEach: number, pixelsNeeded: number): number {
  let step = 1;
  while (step * pixelsEach < pixelsNeeded && step < numLabels) step *= 2;
  return step;
}
