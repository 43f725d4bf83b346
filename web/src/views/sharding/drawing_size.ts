/** Size and colours of the drawing of a tensor. */

const MIN_ASPECT = 0.7;
const MAX_ASPECT = 2.2;
const FLAT = 5; // aspect ratio of a one-dimensional tensor

/** The number at the end of `dim 1: 4096`; 0 if there is none. */
export function parseSideSize(label: string): number {
  return Number(/(\d+)$/.exec(label)?.[1] ?? 0);
}

/** Width and height that fit, in the tensor's aspect ratio unless it is extreme. */
export function fitPicture(
  horizontal: string,
  vertical: string,
  max: { readonly width: number; readonly height: number },
): { width: number; height: number } {
  const across = parseSideSize(horizontal);
  const down = parseSideSize(vertical);
  const ratio = across && down ? across / down : 1;
  const aspect = vertical ? Math.min(Math.max(ratio, MIN_ASPECT), MAX_ASPECT) : FLAT;
  const width = Math.min(max.width, max.height * aspect);
  return { width, height: width / aspect };
}

const STRENGTHS = [0.95, 0.75, 0.6];
const NUM_SERIES = 8;

/** After eight shards the colours repeat, so the next eight are paler. */
export function shardOpacity(color: number): number {
  return STRENGTHS[Math.floor(color / NUM_SERIES) % STRENGTHS.length] ?? 1;
}
