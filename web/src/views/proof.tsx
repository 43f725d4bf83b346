/** Whether the parallel program is the same as the single device's. */
import { Empty } from "../parts/empty";
import type { View } from "./view";

function Proof() {
  return <Empty>This view is not drawn yet; its data is in the page.</Empty>;
}

export const view: View = {
  id: "proof",
  title: "Proof",
  hasData: (page) => page.proof !== null,
  empty: "Nothing was compared with a single device.",
  command: "shardscope parity TARGET -o recording.json",
  Component: Proof,
};
