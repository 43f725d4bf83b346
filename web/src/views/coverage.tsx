/** Which ops shard, and what blocks the others. */
import { Empty } from "../parts/empty";
import type { View } from "./view";

function Coverage() {
  return <Empty>This view is not drawn yet; its data is in the page.</Empty>;
}

export const view: View = {
  id: "coverage",
  title: "Coverage",
  hasData: (page) => page.coverage.length > 0,
  empty: "Nobody asked which ops shard.",
  command: "shardscope coverage TARGET -o recording.json",
  Component: Coverage,
};
