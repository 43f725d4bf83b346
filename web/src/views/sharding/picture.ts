/** How large the picture of a tensor is: true to its shape, unless that is far from a square. */

const MAX_ASPECT = 2.6;
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
  const true_ = across && down ? across / down : FLAT;
  const aspect = vertical ? Math.min(Math.max(true_, 1 / MAX_ASPECT), MAX_ASPECT) : FLAT;
  const width = Math.min(most.width, most.height * aspect);
  return { width, height: width / aspect };
}

/** Pieces past the eighth have colours that were there before, so each round is paler. */
export function strengthOf(color: number, numSeries = 8): number {
  return Math.max(0.85 - 0.13 * Math.floor(Math.max(color, 0) / numSeries), 0.35);
}
