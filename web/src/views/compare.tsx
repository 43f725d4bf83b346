/** Two recordings side by side. */
import { Empty } from "../parts/empty";
import type { View } from "./view";

function Compare() {
  return <Empty>This view is not drawn yet; its data is in the page.</Empty>;
}

export const view: View = {
  id: "compare",
  title: "Compare",
  hasData: (page) => page.comparison !== null,
  empty: "This page is of one recording.",
  command: "shardscope report after.json --against before.json",
  Component: Compare,
};
