/** Collectives: totals, causes, timeline and traffic between ranks. */
import "./communication.css";
import { useMemo } from "preact/hooks";
import type { Communication } from "../page";
import { isInSelection, moduleName, selected } from "../store/modules";
import { page } from "../store/page";
import { changeRoute, navigate, route } from "../store/route";
import { CallsTable } from "./communication/calls_table";
import { Causes } from "./communication/causes";
import { type Facets, isUnfiltered, matchCalls, readFacets } from "./communication/facets";
import { Ranks } from "./communication/ranks";
import { Timeline } from "./communication/timeline";
import { Timings } from "./communication/timings";
import { nameAxis, Totals } from "./communication/totals";
import { TrafficMatrix } from "./communication/traffic_matrix";
import type { View } from "./view";

function CommunicationView() {
  const communication = page.value.communication!;
  const facets = readFacets(communication);
  const hasCalls = communication.calls.rank.length > 0;
  const { axis, kind, phase } = facets;
  const module = selected.value;
  const matches = useMemo(() => {
    const matchesByRow = matchCalls(communication, { axis, kind, phase });
    return matchesByRow.map((isMatch, row) =>
      Number(isMatch === 1 && isInSelection(communication.calls.owner[row]!)),
    );
  }, [communication, axis, kind, phase, module]);
  return (
    <>
      {hasCalls && (
        <div class={communication.matrix_summary ? "comm-stack" : "comm-top"}>
          <div class="comm-stack">
            <Totals communication={communication} facets={facets} />
            <Ranks communication={communication} />
          </div>
          <TrafficMatrix communication={communication} />
        </div>
      )}
      {hasCalls && <ActiveFilter communication={communication} facets={facets} />}
      {hasCalls && <Causes communication={communication} facets={facets} />}
      <Timeline communication={communication} matches={matches} />
      <Timings timings={communication.timings} clock={communication.clock} />
      {hasCalls && <CallsTable communication={communication} facets={facets} />}
    </>
  );
}

/** What the tables below are filtered by, with a button that clears the filter. */
function ActiveFilter({ communication, facets }: { communication: Communication; facets: Facets }) {
  if (isUnfiltered(facets)) return null;
  const { kinds, phases } = communication;
  const words = [
    facets.kind < 0 ? "collectives" : kinds[facets.kind],
    facets.axis >= 0 && `on ${nameAxis(communication, facets.axis)}`,
    facets.phase >= 0 && `in ${phases[facets.phase]}`,
    selected.value >= 0 && `of ${moduleName(selected.value)}`,
  ];
  const clearFilter = (): void =>
    navigate(changeRoute(route.value, route.value.view, { axis: null, kind: null, phase: null }), {
      isReplacing: true,
    });
  return (
    <p class="active-filter" role="status">
      Filtered: <b>{words.filter(Boolean).join(" ")}</b>.
      <button type="button" class="text-button" onClick={clearFilter}>
        show all
      </button>
    </p>
  );
}

export const view: View = {
  id: "communication",
  title: "Communication",
  hasData: (page) => page.communication !== null,
  empty: "Collectives were not recorded.",
  command: "shardscope trace TARGET -o recording.json",
  Component: CommunicationView,
};
