/** The timeline: when each rank issued its collectives. Zoom by dragging, Ctrl + wheel, or keys. */
import { useEffect, useMemo, useState } from "preact/hooks";
import type { Communication } from "../../page";
import { Choices } from "../../parts/choices";
import { seriesColor } from "../../parts/colors";
import { Panel } from "../../parts/panel";
import { pluralize } from "../../parts/units";
import { page } from "../../store/page";
import { param, setParam } from "../../store/route";
import { CallDetail } from "./call_detail";
import { hasTimes, type Lanes, makeLanes, type Range, type XAxis, zoom } from "./lanes";
import { selectCall, selectedCall } from "./selected_call";
import { Chart, ZOOM_STEP } from "./timeline_chart";

interface Props {
  readonly communication: Communication;
  readonly matches: Uint8Array; // 1 for calls that match the filter
}

export function Timeline({ communication, matches }: Props) {
  const isTimed = useMemo(() => hasTimes(communication), [communication]);
  const defaultAxis: XAxis = isTimed ? "time" : "order";
  const requestedAxis = param("along");
  const xAxis: XAxis =
    isTimed && (requestedAxis === "time" || requestedAxis === "order")
      ? requestedAxis
      : defaultAxis;
  // Ids of choices are in the address, so do not rename them: links must stay valid.
  const isFolded = param("lanes") === "alike";
  const lanes = useMemo(() => {
    const examples = new Map(communication.ranks.map((row) => [row.example, row.ranks]));
    return makeLanes(communication, xAxis, isFolded ? examples : undefined);
  }, [communication, xAxis, isFolded]);
  const [view, setView] = useState<Range>(lanes.range);
  useEffect(() => setView(lanes.range), [lanes]);
  const hasCalls = communication.calls.rank.length > 0;
  const numGroups = communication.ranks.length; // of identical ranks
  const canFold = isFolded || (numGroups > 0 && numGroups < lanes.all.length);
  const middle = (view.low + view.high) / 2;
  return (
    <Panel
      title="Timeline"
      note={describe(lanes, hasCalls, communication.clock)}
      controls={
        <>
          {canFold && (
            <Choices
              label="lanes"
              choices={[
                { id: "ranks", title: "Every rank" },
                {
                  id: "alike",
                  title: "Group identical ranks",
                  hint: "one lane for ranks that issued the same collectives",
                },
              ]}
              value={isFolded ? "alike" : "ranks"}
              onChange={(id) => setParam("lanes", id === "ranks" ? null : id)}
            />
          )}
          {isTimed && hasCalls && (
            <Choices
              label="from left to right"
              choices={[
                { id: "time", title: "Time", hint: "each rank's clock since its recording began" },
                { id: "order", title: "Order", hint: "one after the other" },
              ]}
              value={xAxis}
              onChange={(id) => setParam("along", id === defaultAxis ? null : id)}
            />
          )}
          <span class="zoom-buttons">
            <button
              type="button"
              class="icon-button"
              aria-label="zoom in"
              onClick={() => setView(zoom(view, lanes.range, ZOOM_STEP, middle))}
            >
              +
            </button>
            <button
              type="button"
              class="icon-button"
              aria-label="zoom out"
              onClick={() => setView(zoom(view, lanes.range, 1 / ZOOM_STEP, middle))}
            >
              −
            </button>
            <button type="button" class="text-button" onClick={() => setView(lanes.range)}>
              Reset zoom
            </button>
          </span>
        </>
      }
    >
      <Chart
        communication={communication}
        matches={matches}
        lanes={lanes}
        view={view}
        onView={setView}
      />
      <ul class="legend" aria-label="kinds">
        {communication.kinds.map((kind, i) => (
          <li key={kind}>
            <span class="swatch" style={{ background: seriesColor(i) }} />
            {kind}
          </li>
        ))}
      </ul>
      {selectedCall.value.isOnTimeline && selectedCall.value.row >= 0 && (
        <div class="table-detail">
          <button type="button" class="close" aria-label="close" onClick={() => selectCall(-1)}>
            ×
          </button>
          <CallDetail row={selectedCall.value.row} />
        </div>
      )}
    </Panel>
  );
}

function describe({ xAxis, numLeftOut }: Lanes, hasCalls: boolean, clock: string): string {
  const order =
    page.value.run.world === "simulated" ? "simulated order, not time" : "order of issue, not time";
  const words = [
    xAxis === "time"
      ? `A lane for each rank, by its own clock${clock && ` (${clock})`}.`
      : `A lane for each rank, in ${order}.`,
    numLeftOut > 0 && `${pluralize(numLeftOut, "rank")} more are not drawn.`,
    // The table has all calls then, and does not say which of them the timeline has.
    page.value.communication!.num_served > 0 && page.value.communication!.left_out,
    hasCalls && "Height: bytes sent; the mark below a bar is the collective itself.",
    "Drag to zoom.",
  ];
  return words.filter(Boolean).join(" ");
}
