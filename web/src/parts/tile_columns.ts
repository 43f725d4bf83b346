/** Number of tiles in a row. */
import { remPixels } from "./canvas";

const TILE_REM = 12.5;
const NARROW_REM = 47; // below this width the style sheet hides the notes
const NARROW_COLUMNS = 3; // of tiles without notes

/** The fewest columns that need no more rows: eight tiles where seven fit become two rows of four. */
export function countColumns(
  numTiles: number,
  width: number,
  { remSize = remPixels(), narrowColumns = NARROW_COLUMNS } = {},
): number {
  const rems = width / remSize;
  const max = rems < NARROW_REM ? narrowColumns : Math.floor(rems / TILE_REM);
  const numRows = Math.ceil(numTiles / max);
  return Math.max(1, Math.ceil(numTiles / numRows));
}
