/** The picture of the modules: an icicle chart with its measures, colours, legend and trail. */
import { useMemo } from "preact/hooks";
import type { Page } from "../../page";
import { Choices } from "../../parts/choices";
import { seriesColor } from "../../parts/colors";
import { Empty } from "../../parts/empty_message";
import { Panel } from "../../parts/panel";
import { joinNames } from "../../parts/unfollowed";
import { formatNumber, formatShare, pluralize } from "../../parts/units";
import { comparedFacets } from "../../store/compared_figures";
import { earlier } from "../../store/earlier";
import { earlierModules, isTrafficCompared } from "../../store/earlier_modules";
import { moduleTraffic } from "../../store/module_traffic";
import { page } from "../../store/page";
import { param, setParam } from "../../store/route";
import { words } from "../../store/search";
import { FACETS, listUnfollowed, select, selectedText } from "../../store/selection";
import type { ViewParams } from "../view";
import { Icicle } from "./icicle";
import { findNode, type IcicleNode } from "./icicle_layout";
import {
  countFolded,
  formatEachLayer,
  formatTotalShare,
  type IcicleColor,
  type IcicleModel,
  isBound,
  listColors,
  makeIcicleModel,
  sumMatches,
  sumNames,
} from "./icicle_model";
import { listMeasures, type Measure } from "./measures";
import { labelOf, selectedShown, selectShown, shown } from "./tree_state";

const COLORS: Readonly<Record<IcicleColor, { title: string; hint: string }>> = {
  axis: { title: "Axis", hint: "mesh axes of the collectives" },
  kind: { title: "Kind", hint: "kinds of collectives" },
  phase: { title: "Phase", hint: "forward, backward, optimizer" },
  memory: { title: "Memory kind", hint: "what the memory is used for" },
  change: { title: "Change", hint: "what grew and what shrank since the earlier recording" },
  own: { title: "Own share", hint: "the share that belongs to no child" },
};

interface Props {
  readonly maxDepth?: number; // levels that are drawn below the zoomed module
}

/** What the address can choose. */
export function listPictureParams(current: Page): ViewParams {
  const measures = listMeasures(current);
  const colors = measures.flatMap((measure) => listColors(current, measure));
  return { by: measures.map(({ id }) => id), color: [...new Set(colors)] };
}

export function ModulePicture({ maxDepth = 9 }: Props) {
  const current = page.value;
  const measures = listMeasures(current);
  const measure = measures.find(({ id }) => id === param("by")) ?? measures[0];
  if (!measure)
    return <Empty>No bytes, parameters or memory were recorded for these modules.</Empty>;
  const colors = listColors(current, measure);
  const color = colors.find((id) => id === param("color")) ?? colors[0]!;
  return (
    <Panel
      title="Where it goes"
      note={describe(measure, color)}
      follows={measure.isTraffic ? FACETS : ["module"]}
      controls={
        <>
          {colors.length > 1 && (
            <Choices
              label="colour"
              choices={colors.map((id) => ({ id, ...COLORS[id] }))}
              value={color}
              onChange={(id) => setParam("color", id === colors[0] ? null : id)}
            />
          )}
          <Choices
            label="width"
            choices={measures}
            value={measure.id}
            onChange={(id) => setParam("by", id === measures[0]?.id ? null : id)}
          />
        </>
      }
    >
      <Picture measure={measure} color={color} maxDepth={maxDepth} />
    </Panel>
  );
}

function describe(measure: Measure, color: IcicleColor): string {
  const width = `Width: ${measure.hint}${color === "change" ? ", before or after, whichever is more" : ""}.`;
  const ranks =
    measure.isTraffic && moduleTraffic.value.some(({ isUneven }) => isUneven)
      ? " Ranks differ: figures (≤) are of the rank that sends most, and widths add up what different ranks send."
      : "";
  return `${width} Identical layers are one box, with the sum of them all.${ranks}${describeComparison(measure)}`;
}

/** Why the picture does not show what changed, though the page is compared with another. */
function describeComparison({ isTraffic }: Measure): string {
  if (!earlier.value || !isTraffic || isTrafficCompared.value) return "";
  return ` Not compared with ${earlier.value.name} by ${joinNames(listUnfollowed(comparedFacets.value))}.`;
}

interface PictureProps {
  readonly measure: Measure;
  readonly color: IcicleColor;
  readonly maxDepth: number;
}

function Picture({ measure, color, maxDepth }: PictureProps) {
  const current = page.value;
  const model = useMemo(
    () => makeIcicleModel({ page: current, measure, color, shown: shown.value }),
    [current, measure, color, moduleTraffic.value, earlierModules.value, shown.value],
  );
  const selection = findNode(model.roots, String(selectedShown.value));
  const zoomed = selection?.children.length ? selection : (selection?.parent ?? null);
  const selectNode = (node: IcicleNode): void => {
    // The zoomed box again zooms out to its parent.
    if (node.id === selection?.id) selectShown(node.parent?.module ?? -1);
    else if (node.module >= 0) selectShown(node.module);
  };
  return (
    <>
      <div class="icicle-head">
        <Trail model={model} node={selection} />
        <Legend model={model} />
      </div>
      <Matches model={model} />
      {model.roots.length ? (
        <Icicle
          model={model}
          zoomed={zoomed}
          selected={selection}
          maxDepth={maxDepth}
          onSelect={selectNode}
          onZoomOut={() => selection && selectShown(selection.parent?.module ?? -1)}
        />
      ) : (
        <p class="comm-quiet">No collective matches the filter.</p>
      )}
    </>
  );
}

/** The zoomed module's ancestors, each of which zooms out to it, and its figure. */
function Trail({ model, node }: { readonly model: IcicleModel; readonly node: IcicleNode | null }) {
  const { measure, sizes, total } = model;
  if (!node) {
    return (
      <p class="icicle-trail">
        <b>{`${isBound(measure, 0) ? "≤ " : ""}${measure.format(total)}`}</b>{" "}
        <span class="dim">in all. Click a box to zoom in, or use the arrow keys and Enter.</span>
      </p>
    );
  }
  const { modules } = page.value;
  const ancestors: IcicleNode[] = [];
  for (let above = node.parent; above; above = above.parent) ancestors.unshift(above);
  const numLayers = countFolded(modules, model, node.module);
  const size = sizes[node.module]!;
  return (
    <nav class="icicle-trail" aria-label="zoomed module">
      <button
        type="button"
        class="icon-button"
        aria-label="zoom out"
        title="zoom out (Backspace)"
        onClick={() => selectShown(node.parent?.module ?? -1)}
      >
        ←
      </button>
      {ancestors.map(({ module }) => (
        <span key={module}>
          <button type="button" class="trail-step" onClick={() => selectShown(module)}>
            {labelOf(module)}
          </button>{" "}
          <span class="dim">/</span>
        </span>
      ))}
      <b class="mono">
        {labelOf(node.module)}
        {numLayers > 1 && ` × ${formatNumber(numLayers)}`}
      </b>
      <span>
        {measure.format(size)}, {formatTotalShare(model, node)} of the total
        {model.numRepresented[node.module]! > 1 && `, ${formatEachLayer(model, node.module)}`}
      </span>
    </nav>
  );
}

/** What the colours mean; for collectives, a click selects a name in every view. */
function Legend({ model }: { readonly model: IcicleModel }) {
  const { color, measure } = model;
  if (color === "change") return <ChangeLegend />;
  if (color === "own") {
    return <p class="legend">Stronger colour: more of it is the module's own.</p>;
  }
  const facet = color === "memory" ? null : color;
  const selectedName = facet && selectedText(facet);
  const items = sumNames(model).filter(({ size, name }) => size > 0 || name === selectedName);
  return (
    <div class="legend" role="group" aria-label={`colours: ${COLORS[color].title.toLowerCase()}`}>
      {items.map(({ name, series, size }) => {
        const content = (
          <>
            <span class="swatch" style={{ background: seriesColor(series) }} />
            {name} <span class="dim">{measure.format(size)}</span>
          </>
        );
        if (!facet) return <span key={name}>{content}</span>;
        return (
          <button
            type="button"
            key={name}
            aria-pressed={name === selectedName}
            title={`select ${name} in every view`}
            onClick={() => select(facet, name === selectedName ? null : name)}
          >
            {content}
          </button>
        );
      })}
    </div>
  );
}

function ChangeLegend() {
  return (
    <p class="legend">
      <span>
        <span class="swatch" style={{ background: seriesColor(5) }} /> more than before
      </span>
      <span>
        <span class="swatch" style={{ background: seriesColor(0) }} /> less
      </span>
      <span>
        <span class="swatch" style={{ background: seriesColor(-1) }} /> no change
      </span>
      <span class="dim">Stronger colour: a larger part of it changed. Hatched: gone.</span>
    </p>
  );
}

/** How much of the total the modules have that match the search. */
function Matches({ model }: { readonly model: IcicleModel }) {
  if (!words.value.length) return null;
  const { numModules, size, total } = sumMatches(page.value.modules, model.weights, words.value);
  return (
    <p class="icicle-matches" role="status">
      {numModules
        ? `${pluralize(numModules, "module matches", "modules match")} the search: ${model.measure.format(size)}, ${formatShare(size, total)} of the total.`
        : "No module matches the search."}
    </p>
  );
}
