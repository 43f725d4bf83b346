/** How large the picture of a tensor is: true to its shape, unless that is far from a square. */

const MIN_ASPECT = 0.7;
const MAX_ASPECT = 2.2;
const FLAT = 5; // how much wider than high a row of elements is

/** The figure at the end of `dim 1: 4096`; 0 where there is none. */
export function sizeOfSide(label: string): number {
  return Number(/(\d+)$/.exec(label)?.[1] ?? 0);
}

/** Width and height that fit, from what the sides are called. */
export function fitPicture(
  horizontal: string,
  vertical: string,
  most: { readonly width: number; readonly height: number },
): { width: number; height: number } {
  const across = sizeOfSide(horizontal);
  const down = sizeOfSide(vertical);
  const ratio = across && down ? across / down : 1;
  const aspect = vertical ? Math.min(Math.max(ratio, MIN_ASPECT), MAX_ASPECT) : FLAT;
  const width = Math.min(most.width, most.height * aspect);
  return { width, height: width / aspect };
}

const STRENGTHS = [0.95, 0.75, 0.6];
const NUM_SERIES = 8;

/** Pieces past the eighth have colours that were there before, so the next eight are paler. */
export function strengthOf(color: number): number {
  return STRENGTHS[Math.floor(color / NUM_SERIES) % STRENGTHS.length] ?? 1;
}
