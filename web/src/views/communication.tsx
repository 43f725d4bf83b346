/** Collectives, who sends to whom, and why. */
import "./communication.css";
import { useMemo } from "preact/hooks";
import type { Communication as Said } from "../page";
import { isInSelection, nameOf, selected } from "../store/modules";
import { page } from "../store/page";
import { changeRoute, navigate, route } from "../store/route";
import { Calls } from "./communication/calls";
import { type Facets, isOpen, markCalls, readFacets } from "./communication/facets";
import { Ranks } from "./communication/ranks";
import { Reasons } from "./communication/reasons";
import { Sends } from "./communication/sends";
import { Timeline } from "./communication/timeline";
import { Timings } from "./communication/timings";
import { nameAxis, Totals } from "./communication/totals";
import type { View } from "./view";

function Communication() {
  const communication = page.value.communication!;
  const facets = readFacets(communication);
  const hasCalls = communication.calls.rank.length > 0;
  const { axis, kind, phase } = facets;
  const module = selected.value;
  const marks = useMemo(() => {
    const found = markCalls(communication, { axis, kind, phase });
    return found.map((isMarked, row) =>
      Number(isMarked === 1 && isInSelection(communication.calls.owner[row]!)),
    );
  }, [communication, axis, kind, phase, module]);
  return (
    <>
      {hasCalls && (
        <div class="comm-top">
          <div class="comm-stack">
            <Totals communication={communication} facets={facets} />
            <Ranks ranks={communication.ranks} />
          </div>
          <Sends matrix={communication.matrix} note={communication.matrix_note} />
        </div>
      )}
      {hasCalls && <Narrowed communication={communication} facets={facets} />}
      {hasCalls && <Reasons communication={communication} facets={facets} />}
      <Timeline communication={communication} marks={marks} />
      <Timings timings={communication.timings} clock={communication.clock} />
      {hasCalls && <Calls communication={communication} facets={facets} />}
    </>
  );
}

/** What the tables below are filtered by, and a way back to everything. */
function Narrowed({ communication, facets }: { communication: Said; facets: Facets }) {
  if (isOpen(facets)) return null;
  const { kinds, phases } = communication;
  const words = [
    facets.kind < 0 ? "collectives" : kinds[facets.kind],
    facets.axis >= 0 && `on ${nameAxis(communication, facets.axis)}`,
    facets.phase >= 0 && `in ${phases[facets.phase]}`,
    selected.value >= 0 && `of ${nameOf(selected.value)}`,
  ];
  const clear = (): void =>
    navigate(changeRoute(route.value, route.value.view, { axis: null, kind: null, phase: null }), {
      isReplacing: true,
    });
  return (
    <p class="narrowed" role="status">
      Filtered: <b>{words.filter(Boolean).join(" ")}</b>.
      <button type="button" class="text-button" onClick={clear}>
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
  Component: Communication,
};
