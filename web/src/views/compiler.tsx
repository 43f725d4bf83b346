/** Graphs, lines that break them, and whether compiled results are right. */
import { Empty } from "../parts/empty";
import type { View } from "./view";

function Compiler() {
  return <Empty>This view is not drawn yet; its data is in the page.</Empty>;
}

export const view: View = {
  id: "compiler",
  title: "Compiler",
  hasData: (page) => page.compiler !== null,
  empty: "Nothing was compiled while it was watched.",
  command: "shardscope explain TARGET -o recording.json",
  Component: Compiler,
};
