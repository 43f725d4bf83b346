/** What the icicle chart shows: sizes, colours and texts of its boxes, for a measure and a filter. */
import type { Communication, Modules, Page } from "../../page";
import { type ColorFacet, facetSeries } from "../../parts/colors";
import { formatShare } from "../../parts/units";
import { earlierModules } from "../../store/earlier_modules";
import { moduleTraffic } from "../../store/module_traffic";
import { containsWords } from "../../store/search";
import { makeTrafficFilter, sumRows, trafficRows } from "../../store/traffic";
import { countRepresented, findSpread, formatEach, sumShown } from "./folded_sums";
import { type Box, type IcicleNode, layoutIcicle, measureWeights } from "./icicle_layout";
import type { BoxStyle, Segment } from "./icicle_painter";
import { findEarlier, type Measure } from "./measures";
import { splitTraffic } from "./traffic_parts";

/** What boxes are coloured by: `own` is the share that belongs to no child. */
export type IcicleColor = ColorFacet | "memory" | "change" | "own";

export interface LegendItem {
  readonly name: string;
  readonly series: number;
  readonly size: number;
}

export interface IcicleModel {
  readonly measure: Measure;
  readonly color: IcicleColor;
  readonly roots: readonly IcicleNode[];
  readonly total: number; // of all roots
  readonly shown: Int32Array;
  readonly numRepresented: Float64Array; // by shown module
  readonly values: ArrayLike<number>; // by module
  readonly weights: Float64Array; // likewise; a module's children add up to no more than its own
  readonly sizes: Float64Array; // sums of what each shown module represents
  readonly earlier: Float64Array | null; // likewise, of the earlier recording
  readonly parts: readonly Float64Array[]; // likewise, by position in `legend`
  readonly legend: readonly LegendItem[];
}

interface ModelInput {
  readonly page: Pick<Page, "modules" | "communication" | "memory">;
  readonly measure: Measure;
  readonly color: IcicleColor;
  readonly shown: Int32Array;
}

/** Colours that a measure can have, the default first. */
export function listColors({ modules }: Page, measure: Measure): IcicleColor[] {
  const colors: IcicleColor[] = findEarlier(modules, measure) ? ["change"] : [];
  if (measure.isTraffic) colors.push(...FACETS);
  else if (measure.id === "memory" && modules.own_peak.module.length) colors.push("memory");
  else colors.push("own");
  return colors;
}

const FACETS = ["axis", "kind", "phase"] as const;

export function makeIcicleModel({ page, measure, color, shown }: ModelInput): IcicleModel {
  const { modules } = page;
  const raw = measure.isTraffic
    ? measureTraffic(page, measure, color)
    : { values: modules.path.map((_, i) => measure.sizeOf(modules, i)), parts: [], names: [] };
  const memory = color === "memory" ? splitMemory(modules) : null;
  const { names, parts: rawParts } = memory ?? raw;
  const sizes = sumShown(raw.values, shown);
  const comparison = color === "change" ? findEarlier(modules, measure) : null;
  const earlier = comparison && sumShown(comparison.values, shown);
  const roots = layoutIcicle({
    modules,
    shown,
    sizes: earlier ? sizes.map((size, i) => Math.max(size, earlier[i]!)) : sizes,
    gone: comparison?.gone.map((gone) => ({
      parent: gone.parent < 0 ? -1 : shown[gone.parent]!,
      size: comparison.goneSize(gone),
    })),
  });
  const parts = rawParts.map((part) => sumShown(part, shown));
  return {
    measure,
    color,
    roots,
    total: sumRoots(modules, raw.values),
    shown,
    numRepresented: countRepresented(shown),
    values: raw.values,
    weights: measureWeights({ modules, shown: shown.map((_, i) => i), sizes: raw.values }),
    sizes,
    earlier,
    parts,
    legend: names.map((name, i) => ({
      name: name || "no axis",
      series: memory ? findMemorySeries(page, name) : facetSeries(color as ColorFacet, name, i),
      size: memory ? sumRoots(modules, parts[i]!) : 0,
    })),
  };
}

/** Figures of the names of a facet, whichever of them is selected. */
export function sumNames(model: IcicleModel): readonly LegendItem[] {
  const facet = FACETS.find((name) => name === model.color);
  if (!facet) return model.legend;
  const figure = model.measure.id === "count" ? "count" : "wire_bytes";
  const sums = new Map(sumRows([facet], [facet]).map((sum) => [sum.values[0], sum[figure]]));
  return model.legend.map((item, i) => ({ ...item, size: sums.get(i) ?? 0 }));
}

function sumRoots({ parent }: Modules, values: ArrayLike<number>): number {
  return parent.reduce((sum, above, i) => (above < 0 ? sum + (values[i] ?? 0) : sum), 0);
}

interface RawFigures {
  readonly values: ArrayLike<number>;
  readonly parts: readonly ArrayLike<number>[];
  readonly names: readonly string[];
}

/** What is selected, of all modules: a selected module is zoomed, and the others stay visible. */
function measureTraffic(
  { modules, communication }: ModelInput["page"],
  measure: Measure,
  color: IcicleColor,
): RawFigures {
  const facet = FACETS.find((name) => name === color) ?? "axis";
  const names = communication ? listNames(communication, facet) : [];
  const { totals, parts } = splitTraffic(modules, trafficRows.value, {
    figure: measure.id === "count" ? "count" : "wire_bytes",
    facet,
    numParts: names.length,
    isIncluded: makeTrafficFilter(["module"]),
  });
  return { values: totals, parts, names };
}

function listNames(communication: Communication, facet: ColorFacet): readonly string[] {
  const { axes, kinds, phases } = communication;
  return { axis: axes, kind: kinds, phase: phases }[facet];
}

function splitMemory(modules: Modules): Pick<RawFigures, "parts" | "names"> {
  const { kinds, module, kind, num_bytes } = modules.own_peak;
  const parts = kinds.map(() => new Float64Array(modules.path.length));
  module.forEach((position, row) => {
    parts[kind[row]!]![position]! += num_bytes[row]!;
  });
  for (const part of parts) {
    for (let i = part.length - 1; i >= 0; i--) {
      if (modules.parent[i]! >= 0) part[modules.parent[i]!]! += part[i]!;
    }
  }
  return { parts, names: kinds };
}

/** Kinds of memory have the colours of the memory view. */
function findMemorySeries({ memory }: Pick<Page, "memory">, name: string): number {
  return memory[0]?.kinds.indexOf(name) ?? -1;
}

const NARROW = 0.3; // strength of a box whose figure belongs to its children, or did not change

export interface StyleInput {
  readonly modules: Modules;
  readonly model: IcicleModel;
  readonly labelOf: (position: number) => string;
  readonly words: readonly string[];
  readonly isAncestor: (node: IcicleNode) => boolean;
}

export function styleBox({ node, numMerged }: Box, input: StyleInput): BoxStyle {
  const { modules, model, labelOf, words, isAncestor } = input;
  const style = { isFaded: false, isAncestor: false, isHatched: false };
  if (!node) {
    const name = numMerged > 1 ? `${numMerged} more` : "";
    return { ...style, segments: [{ series: -1, share: 1 }], strength: NARROW, name, figures: [] };
  }
  if (node.module < 0) {
    const gone = earlierModules.value!.gone[node.gone]!;
    const figures = [`−${model.measure.format(node.size)} (gone)`];
    const segments = [{ series: LESS, share: 1 }];
    return { ...style, isHatched: true, segments, strength: 1, name: lastPart(gone.name), figures };
  }
  const numLayers = countFolded(modules, model, node.module);
  const isFaded =
    words.length > 0 &&
    !containsWords(`${modules.path[node.module]} ${modules.type[node.module]}`, words);
  return {
    ...style,
    ...colorBox(model, node),
    name: numLayers > 1 ? `${labelOf(node.module)}  × ${numLayers}` : labelOf(node.module),
    figures: listFigures(modules, model, node),
    isFaded,
    isAncestor: isAncestor(node),
  };
}

/** `{4…31}` of `layers.{4…31}`. */
function lastPart(name: string): string {
  return name.split(".").at(-1)!;
}

/** How many identical layers are folded into this module itself; 1 if it is not the first of any. */
export function countFolded(modules: Modules, model: IcicleModel, position: number): number {
  const above = modules.parent[position]!;
  const outer = above < 0 ? 1 : model.numRepresented[above]!;
  return Math.round(model.numRepresented[position]! / outer);
}

const MORE = 5; // series of what has grown: vermilion
const LESS = 0; // blue

function colorBox(
  model: IcicleModel,
  node: IcicleNode,
): { segments: readonly Segment[]; strength: number } {
  const { module } = node;
  const size = model.sizes[module]!;
  if (model.earlier) {
    const delta = size - model.earlier[module]!;
    const share = Math.abs(delta) / Math.max(size, model.earlier[module]!, 1);
    const series = delta > 0 ? MORE : delta < 0 ? LESS : -1;
    return { segments: [{ series, share: 1 }], strength: NARROW + (1 - NARROW) * share };
  }
  if (model.color === "own") {
    const share = size > 0 ? node.own / size : 0;
    return { segments: [{ series: 0, share: 1 }], strength: NARROW + (1 - NARROW) * share };
  }
  const sum = model.parts.reduce((total, part) => total + part[module]!, 0);
  const segments = model.legend.flatMap(({ series }, i) => {
    const value = model.parts[i]![module]!;
    return value > 0 ? [{ series, share: value / sum }] : [];
  });
  return { segments, strength: 1 };
}

function listFigures(modules: Modules, model: IcicleModel, { module }: IcicleNode): string[] {
  const { measure, sizes, earlier } = model;
  const size = `${isBound(measure, module) ? "≤ " : ""}${measure.format(sizes[module]!)}`;
  if (earlier) {
    const change = formatChange(sizes[module]!, earlier[module]!, measure.format);
    return [`${change}, now ${size}`, change];
  }
  if (countFolded(modules, model, module) === 1) return [size];
  return [`${size} in all, ${formatEachLayer(model, module)}`, size];
}

/** Whether ranks differ, so that the figure is the busiest rank's. */
export function isBound({ isTraffic }: Measure, position: number): boolean {
  return isTraffic && (moduleTraffic.value[position]?.isUneven ?? false);
}

/** `38.0 MiB each`: the figure of each of the layers that a box represents. */
export function formatEachLayer({ values, shown, measure }: IcicleModel, position: number): string {
  return formatEach(
    findSpread((i) => values[i] ?? 0, shown, position),
    measure.format,
  );
}

/** `+1.20 GiB (+25%)`, `no change`, `new: 3.00 MiB`. */
export function formatChange(
  after: number,
  before: number,
  format: (value: number) => string,
): string {
  if (after === before) return "no change";
  if (!before) return `+${format(after)} (new)`;
  const sign = after > before ? "+" : "−";
  const delta = Math.abs(after - before);
  const share = delta < 10 * before ? `${sign}${formatShare(delta, before)}` : ">999%";
  return `${sign}${format(delta)} (${share})`;
}

/** `12%`: a box's share of all, which its width shows, unless that is the larger of two figures. */
export function formatTotalShare(model: IcicleModel, { module, width }: IcicleNode): string {
  return model.earlier ? formatShare(model.sizes[module]!, model.total) : formatShare(width, 1);
}

export interface SearchShare {
  readonly numModules: number;
  readonly size: number; // without what is inside of another match
  readonly total: number; // of all modules
}

/**
 * Modules that match the search, and their figure: what is inside of a match counts once. Weights
 * of modules are figures that add up, also where ranks differ.
 */
export function sumMatches(
  modules: Modules,
  weights: ArrayLike<number>,
  words: readonly string[],
): SearchShare {
  let numModules = 0;
  let size = 0;
  let end = 0;
  modules.path.forEach((path, i) => {
    if (!containsWords(`${path} ${modules.type[i]}`, words)) return;
    numModules += 1;
    if (i < end) return;
    size += weights[i] ?? 0;
    end = modules.end[i]!;
  });
  return { numModules, size, total: sumRoots(modules, weights) };
}
