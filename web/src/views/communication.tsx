/** Who said what to whom, and why. */
import { Empty } from "../parts/empty";
import type { View } from "./view";

function Communication() {
  return <Empty>This view is not drawn yet; its data is in the page.</Empty>;
}

export const view: View = {
  id: "communication",
  title: "Communication",
  hasData: (page) => page.communication !== null,
  empty: "No collectives were recorded.",
  command: "shardscope trace TARGET -o recording.json",
  Component: Communication,
};
