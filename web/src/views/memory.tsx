/** What memory holds over a step. */
import { Empty } from "../parts/empty";
import type { View } from "./view";

function Memory() {
  return <Empty>This view is not drawn yet; its data is in the page.</Empty>;
}

export const view: View = {
  id: "memory",
  title: "Memory",
  hasData: (page) => page.memory.length > 0,
  empty: "Memory was not measured.",
  command: "shardscope memory TARGET -o recording.json",
  Component: Memory,
};
