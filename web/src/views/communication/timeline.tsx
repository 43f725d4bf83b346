/** The timeline of collectives. Zoom by dragging, wheel or keys; Shift and dragging selects a range. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Communication } from "../../page";
import { type Choice, Choices } from "../../parts/choices";
import { facetColor } from "../../parts/colors";
import { Panel } from "../../parts/panel";
import { pluralize } from "../../parts/units";
import { moduleName, representatives } from "../../store/modules";
import { page } from "../../store/page";
import { param, setParam } from "../../store/route";
import {
  FACETS,
  formatRange,
  listedRankOf,
  nameFacet,
  select,
  selectedText,
  selection,
} from "../../store/selection";
import { busiestRank } from "../../store/traffic";
import type { ViewParams } from "../view";
import { CallDetail } from "./call_detail";
import { hasTimes, type LaneKind, type Lanes, makeLanes } from "./lanes";
import { formatView, parseView, type Range, type XAxis, zoom } from "./ranges";
import { selectCall, selectedCall } from "./selected_call";
import { Chart, ZOOM_STEP } from "./timeline_chart";
import type { HeightScale } from "./timeline_layout";

interface Props {
  readonly communication: Communication;
  readonly matches: Uint8Array; // 1 for calls that match the filter
}

export function Timeline({ communication, matches }: Props) {
  const isTimed = useMemo(() => hasTimes(communication), [communication]);
  const hasCalls = communication.calls.rank.length > 0;
  const xAxis: XAxis = isTimed && param("along") !== "order" ? "time" : "order";
  const scale: HeightScale = param("height") === "log" ? "log" : "linear";
  const laneChoices = listLaneChoices(communication);
  const kind = (laneChoices.find(({ id }) => id === param("lanes")) ?? laneChoices[0]!).id;
  const rank = useMemo(chooseRank, [communication, selection.value.rank]);
  const lanes = useMemo(
    () => makeLanes({ communication, xAxis, kind: kind as LaneKind, rank, nameModule }),
    [communication, xAxis, kind, rank],
  );
  const usedPhases = useMemo(() => new Set(communication.calls.phase), [communication]);
  const [view, setView] = useView(lanes);
  const middle = (view.low + view.high) / 2;
  const { range } = selection.value;
  const selectRange = ({ low, high }: Range): void =>
    select("range", formatRange({ along: xAxis, low, high }));
  return (
    <Panel
      title="Timeline"
      follows={hasCalls ? FACETS : ["rank"]} // spans have no axis, module or line
      note={describe(lanes, hasCalls, communication.clock)}
      controls={
        <>
          {laneChoices.length > 1 && (
            <Choices
              label="lanes"
              choices={laneChoices}
              value={kind}
              onChange={(id) => setParam("lanes", id === laneChoices[0]!.id ? null : id)}
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
              onChange={(id) => setParam("along", id === "time" ? null : id)}
            />
          )}
          {hasCalls && (
            <Choices
              label="height"
              choices={[
                { id: "linear", title: "Bytes", hint: "height: bytes sent" },
                { id: "log", title: "Log", hint: "height: logarithm of the bytes sent" },
              ]}
              value={scale}
              onChange={(id) => setParam("height", id === "linear" ? null : id)}
            />
          )}
          <ZoomButtons
            onZoom={(factor) => setView(zoom(view, lanes.range, factor, middle))}
            onReset={() => setView(lanes.range)}
          />
        </>
      }
    >
      {hasCalls && (
        <div class="timeline-legends">
          <Legend facet="kind" label="bars" names={communication.kinds} />
          <Legend
            facet="phase"
            label="background"
            names={communication.phases}
            isUsed={(phase) => usedPhases.has(phase)}
          />
          <Steps communication={communication} />
        </div>
      )}
      <Chart
        communication={communication}
        matches={matches}
        lanes={lanes}
        view={view}
        scale={scale}
        selectedRange={range?.along === xAxis ? range : null}
        onView={setView}
        onRange={selectRange}
      />
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

/** What the address can choose. */
export function listTimelineParams(communication: Communication): ViewParams {
  return {
    lanes: listLaneChoices(communication).map(({ id }) => id),
    along: ["time", "order"],
    height: ["linear", "log"],
    view: /^\d+(\.\d+)?_\d+(\.\d+)?$/,
  };
}

/** Ids of choices are in the address, so do not rename them: links must stay valid. */
function listLaneChoices({ calls, ranks }: Communication): Choice[] {
  if (!calls.rank.length) return [{ id: "ranks", title: "Ranks" }];
  const numRanks = new Set(calls.rank).size;
  const singleRank: Choice[] = [
    { id: "axis", title: "Axes", hint: "a lane for each mesh axis, of one rank" },
    { id: "module", title: "Modules", hint: "a lane for each module, of one rank" },
  ];
  const ofRanks: Choice[] = [];
  if (ranks.length > 1) {
    const hint = "a lane for ranks that issued the same collectives";
    ofRanks.push({ id: "alike", title: "Different ranks", hint });
  }
  if (numRanks > ranks.length || numRanks === 1)
    ofRanks.push({ id: "ranks", title: numRanks === 1 ? "Rank" : "Every rank" });
  // If ranks differ, that is what to see first.
  return ranks.length > 1 ? [...ofRanks, ...singleRank] : [...singleRank, ...ofRanks];
}

/** The rank of lanes that have one: the selected one, or the one that sends most. */
function chooseRank(): number {
  const { rank } = selection.value;
  if (rank >= 0) return listedRankOf(rank);
  // A very large recording may not list the collectives of the rank that sends most.
  const { rank: listed = [] } = page.value.communication?.calls ?? {};
  const isListed = !listed.length || listed.includes(busiestRank.value);
  return isListed ? busiestRank.value : listed[0]!;
}

/** Identical layers have one lane: `layers.*.attention`. */
function nameModule(position: number): string {
  if (position < 0) return moduleName(position);
  const name = moduleName(representatives.value[position]!);
  return name.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");
}

const ADDRESS_MS = 300; // browsers limit how often the address may change

/** The visible range, which the address follows with some delay. */
function useView({ range }: Lanes): [Range, (view: Range) => void] {
  const inAddress = param("view");
  const [view, setView] = useState<Range>(() => parseView(inAddress, range) ?? range);
  const timer = useRef(0);
  const written = useRef(inAddress);
  useEffect(() => {
    // Not if the address has just followed the view.
    if (inAddress !== written.current || parseView(inAddress, range) === null) {
      setView(parseView(inAddress, range) ?? range);
    }
    written.current = inAddress;
  }, [range, inAddress]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const changeView = (next: Range): void => {
    setView(next);
    clearTimeout(timer.current);
    timer.current = window.setTimeout(() => {
      const text = formatView(next, range);
      written.current = text ?? undefined;
      setParam("view", text);
    }, ADDRESS_MS);
  };
  return [view, changeView];
}

interface ZoomProps {
  readonly onZoom: (factor: number) => void;
  readonly onReset: () => void;
}

function ZoomButtons({ onZoom, onReset }: ZoomProps) {
  return (
    <span class="zoom-buttons">
      <button
        type="button"
        class="icon-button"
        aria-label="zoom in"
        onClick={() => onZoom(ZOOM_STEP)}
      >
        +
      </button>
      <button
        type="button"
        class="icon-button"
        aria-label="zoom out"
        onClick={() => onZoom(1 / ZOOM_STEP)}
      >
        −
      </button>
      <button type="button" class="text-button" onClick={onReset}>
        Reset zoom
      </button>
    </span>
  );
}

interface LegendProps {
  readonly facet: "kind" | "phase";
  readonly label: string;
  readonly names: readonly string[];
  readonly isUsed?: (position: number) => boolean;
}

/** Names with their colours; a click selects one in every view. */
function Legend({ facet, label, names, isUsed = () => true }: LegendProps) {
  const selectedName = selectedText(facet);
  return (
    <div class="legend" role="group" aria-label={label}>
      <span class="dim">{label}</span>
      {names.map(
        (name, i) =>
          isUsed(i) && (
            <button
              type="button"
              key={name}
              aria-pressed={name === selectedName}
              title={`select ${name} in every view`}
              onClick={() => select(facet, name === selectedName ? null : name)}
            >
              <span class="swatch" style={{ background: facetColor(facet, name, i) }} />
              {name}
            </button>
          ),
      )}
    </div>
  );
}

const MAX_STEPS = 12; // that have a button; others are selected in the table

/** Numbers of the steps, or of the forward passes; a click selects one in every view. */
function Steps({ communication: { num_steps: number, step_word } }: Omit<Props, "matches">) {
  if (!number || number > MAX_STEPS) return null;
  const { step: selected } = selection.value;
  return (
    <div class="legend" role="group" aria-label="steps">
      <span class="dim">{step_word === "step" ? "steps" : "forward passes"}</span>
      {Array.from({ length: number }, (_, at) => at + 1).map((step) => (
        <button
          type="button"
          key={step}
          class="legend-number"
          aria-pressed={step === selected}
          title={`select ${nameFacet("step")} ${step} in every view`}
          onClick={() => select("step", step === selected ? null : String(step))}
        >
          {step}
        </button>
      ))}
    </div>
  );
}

function describe(
  { xAxis, rank, kind, numLeftOut }: Lanes,
  hasCalls: boolean,
  clock: string,
): string {
  const along =
    xAxis === "time"
      ? `by its own clock${clock && ` (${clock})`}`
      : page.value.run.world.startsWith("simulated")
        ? "in order of issue: a simulation has no time"
        : "in order of issue, not time";
  const what = kind === "module" ? "module" : "mesh axis";
  const lanes = rank >= 0 ? `Collectives of rank ${rank} by ${what}` : "A lane for each rank";
  const words = [
    `${lanes}, ${along}.`,
    numLeftOut > 0 &&
      `${pluralize(numLeftOut, kind === "module" ? "module" : "rank")} more are not drawn.`,
    // The table has all calls then, and does not say which of them the timeline has.
    page.value.communication!.num_served > 0 && page.value.communication!.left_out,
    hasCalls && "Height: bytes sent; the mark below a bar is the collective itself.",
    hasCalls ? "Drag to zoom; Shift and drag selects a range." : "Drag to zoom.",
  ];
  return words.filter(Boolean).join(" ");
}
