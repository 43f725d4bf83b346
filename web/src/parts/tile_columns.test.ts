import { expect, test } from "vitest";
import { countColumns } from "./tile_columns";

test.each([
  [8, 1238, 4], // seven would fit
  [7, 1238, 7],
  [5, 760, 3],
  [8, 370, 3],
  [4, 370, 2],
  [1, 370, 1],
  [3, 0, 3], // not measured yet
])("%i tiles in %i pixels have %i columns", (numTiles, width, columns) => {
  expect(countColumns(numTiles, width, { remSize: 14 })).toBe(columns);
});
