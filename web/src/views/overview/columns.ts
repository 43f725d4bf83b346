/** How many tiles stand beside each other. */

const TILE_REM = 12.5;
const NARROW_REM = 47; // without notes, as the style sheet has it
const NARROW_COLUMNS = 3;

/** As few as make no more rows than there must be: eight where seven fit are two rows of four. */
export function countColumns(numTiles: number, width: number, remSize: number): number {
  const rems = width / remSize;
  const most = rems < NARROW_REM ? NARROW_COLUMNS : Math.floor(rems / TILE_REM);
  const numRows = Math.ceil(numTiles / most);
  return Math.max(1, Math.ceil(numTiles / numRows));
}
