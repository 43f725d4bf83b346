/** Each parameter's placement, drawn over its mesh. */
import { Empty } from "../parts/empty";
import type { View } from "./view";

function Sharding() {
  return <Empty>This view is not drawn yet; its data is in the page.</Empty>;
}

export const view: View = {
  id: "sharding",
  title: "Sharding",
  hasData: (page) => page.sharding !== null,
  empty: "No parameters were recorded.",
  command: "shardscope audit TARGET -o recording.json",
  Component: Sharding,
};
