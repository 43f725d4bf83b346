/** Collectives: totals, causes, timeline and traffic between ranks. */
import "./communication.css";
import { page } from "../store/page";
import { selectedCalls } from "../store/selection";
import { CallsTable } from "./communication/calls_table";
import { Causes } from "./communication/causes";
import { Ranks } from "./communication/ranks";
import { listTimelineParams, Timeline } from "./communication/timeline";
import { Timings } from "./communication/timings";
import { Totals } from "./communication/totals";
import { TrafficMatrix } from "./communication/traffic_matrix";
import type { View } from "./view";

function CommunicationView() {
  const communication = page.value.communication!;
  const hasCalls = communication.traffic.count.length > 0;
  return (
    <>
      {hasCalls && (
        <div class={communication.matrix_summary ? "comm-stack" : "comm-top"}>
          <div class="comm-stack">
            <Totals communication={communication} />
            <Ranks communication={communication} />
          </div>
          <TrafficMatrix communication={communication} />
        </div>
      )}
      {hasCalls && <Causes communication={communication} />}
      <Timeline communication={communication} matches={selectedCalls.value} />
      <Timings timings={communication.timings} clock={communication.clock} />
      {hasCalls && <CallsTable communication={communication} />}
    </>
  );
}

export const view: View = {
  id: "communication",
  title: "Communication",
  hasData: (page) => page.communication !== null,
  empty: "Collectives were not recorded.",
  command: "shardscope trace TARGET -o recording.json",
  params: ({ communication }) => ({
    show: ["bytes", "counts"],
    ...(communication && listTimelineParams(communication)),
  }),
  Component: CommunicationView,
};
