/** When each rank issued what: zoom in by dragging, by Ctrl and the wheel, or by keys. */
import { useEffect, useMemo, useState } from "preact/hooks";
import type { Communication } from "../../page";
import { Choices } from "../../parts/choice";
import { colorOf } from "../../parts/colors";
import { Panel } from "../../parts/panel";
import { countOf } from "../../parts/units";
import { page } from "../../store/page";
import { param, setParam } from "../../store/route";
import { CallDetail } from "./call";
import { Chart, ZOOM_STEP } from "./chart";
import { chooseCall, chosen } from "./chosen";
import { type Along, hasTimes, type Lanes, layLanes, type Range, zoom } from "./lanes";

interface Props {
  readonly communication: Communication;
  readonly marks: Uint8Array; // of calls that are looked at
}

export function Timeline({ communication, marks }: Props) {
  const isTimed = useMemo(() => hasTimes(communication), [communication]);
  const usual: Along = isTimed ? "time" : "order";
  const wanted = param("along");
  const along: Along = isTimed && (wanted === "time" || wanted === "order") ? wanted : usual;
  const isFolded = param("lanes") === "alike";
  const lanes = useMemo(() => {
    const examples = new Map(communication.ranks.map((one) => [one.example, one.ranks]));
    return layLanes(communication, along, isFolded ? examples : undefined);
  }, [communication, along, isFolded]);
  const [view, setView] = useState<Range>(lanes.range);
  useEffect(() => setView(lanes.range), [lanes]);
  const hasCalls = communication.calls.rank.length > 0;
  const numKinds = communication.ranks.length; // of ranks that issued the same
  const canFold = isFolded || (numKinds > 0 && numKinds < lanes.all.length);
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
                  hint: "one lane for ranks that issued the same",
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
              value={along}
              onChange={(id) => setParam("along", id === usual ? null : id)}
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
        marks={marks}
        lanes={lanes}
        view={view}
        onView={setView}
      />
      <ul class="legend" aria-label="kinds">
        {communication.kinds.map((kind, i) => (
          <li key={kind}>
            <span class="swatch" style={{ background: colorOf(i) }} />
            {kind}
          </li>
        ))}
      </ul>
      {chosen.value.isOnTimeline && chosen.value.row >= 0 && (
        <div class="table-detail">
          <button type="button" class="close" aria-label="close" onClick={() => chooseCall(-1)}>
            ×
          </button>
          <CallDetail row={chosen.value.row} />
        </div>
      )}
    </Panel>
  );
}

function describe({ along, numLeftOut }: Lanes, hasCalls: boolean, clock: string): string {
  const order =
    page.value.run.reality === "simulated"
      ? "simulated order, not time"
      : "order of issue, not time";
  const words = [
    along === "time"
      ? `A lane for each rank, by its own clock${clock && ` (${clock})`}.`
      : `A lane for each rank, in ${order}.`,
    numLeftOut > 0 && `${countOf(numLeftOut, "rank")} more are not drawn.`,
    hasCalls && "Height: bytes sent; the mark below a bar is the collective itself.",
    "Drag to zoom.",
  ];
  return words.filter(Boolean).join(" ");
}
