/**
 * Figures of a recording that was dropped onto the page, with the names that Python gives those of a
 * page. What takes more than counting is not compared, and the page says so (`NOT_COMPARED`).
 */
import type { Figure } from "../page";
import { makeFigure } from "./figure_parts";
import type { RecordedExplanation, RecordedParameter, RecordedRun } from "./recorded_run";

/** What a view's figures leave out; a command compares it. */
export const NOT_COMPARED: Readonly<Record<string, string>> = {
  modules: "parameters of modules",
  sharding: "bytes of parameters",
  compiler: "diagnoses",
};

/** Figures of views other than communication and memory, which are summed from their data. */
export function listRecordedFigures(recording: RecordedRun): Figure[] {
  return [
    ...listFindings(recording),
    ...listModules(recording),
    ...listSharding(recording),
    ...listCoverage(recording),
    ...listCompiler(recording),
    ...listProof(recording),
  ];
}

function counts(view: string, group: string, numbers: Iterable<[string, number]>): Figure[] {
  return [...numbers].map(([label, value]) => makeFigure(view, group, label, "count", value));
}

function countBy(names: Iterable<string>, zeros: readonly string[] = []): Map<string, number> {
  const numbers = new Map(zeros.map((name) => [name, 0]));
  for (const name of names) numbers.set(name, (numbers.get(name) ?? 0) + 1);
  return numbers;
}

function listFindings({ findings = [], gaps = [] }: RecordedRun): Figure[] {
  const severities = findings.map(({ severity }) => severity);
  const rules = findings.map(({ rule }) => rule);
  const distinctGaps = new Set(
    gaps.map((gap) => JSON.stringify([gap.place, gap.fact, gap.is_loss])),
  );
  return [
    ...counts("overview", "findings", countBy(severities, ["error", "warning", "info"])),
    ...counts("overview", "findings by rule", countBy(rules)),
    ...counts("overview", "findings", [["gaps", distinctGaps.size]]),
  ];
}

/** A module may have several classes on several ranks. */
function listModules({ modules = [] }: RecordedRun): Figure[] {
  const types = new Map<string, Set<string>>();
  for (const { name, type } of modules) types.set(name, (types.get(name) ?? new Set()).add(type));
  const joined = [...types.values()].map((names) => [...names].join("|")).filter(Boolean);
  if (!joined.length) return [];
  return counts("modules", "modules", [["all", joined.length], ...countBy(joined)]);
}

function listSharding({ modules = [], run }: RecordedRun): Figure[] {
  const parameters = modules.flatMap((module) => module.parameters ?? []);
  const placements = parameters.map((parameter) =>
    describePlacement(parameter, run?.world_size ?? 1),
  );
  return counts("sharding", "tensors by placement", countBy(placements));
}

function describePlacement(parameter: RecordedParameter, worldSize: number): string {
  const { axes, placements, is_annotated: isAnnotated, fsdp_group: group } = parameter;
  if (placements.length) {
    const words = placements.slice(0, axes.length).map((words, at) => `${axes[at]}: ${words}`);
    return words.join(", ") + (isAnnotated ? " (annotated with spmd_types)" : "");
  }
  if (group !== null && group !== undefined) return "flattened with the others of its FSDP group";
  return worldSize > 1 ? "not distributed" : "not sharded";
}

const VERDICTS = [
  ...["wrong", "missing", "replicated", "redistributed", "decomposed", "sharded", "local"],
];

/** Of one rank: levels of ranks that differ are named by Python. */
function listCoverage({ coverage = [] }: RecordedRun): Figure[] {
  if (new Set(coverage.map(({ rank }) => rank)).size > 1) return [];
  return coverage.flatMap(({ level, ops }) =>
    counts(
      "coverage",
      `ops, ${level}`,
      countBy(
        ops.map(({ verdict }) => verdict),
        VERDICTS,
      ),
    ),
  );
}

/** Ranks that compiled the same share figures; how long it took may differ. */
function listCompiler({ explanations = [] }: RecordedRun): Figure[] {
  const distinct = new Map(
    explanations.map((item) => [JSON.stringify({ ...item, rank: 0, stages: [] }), item] as const),
  );
  return [...distinct.values()].flatMap((item) =>
    counts("compiler", item.target, countCompiled(item)),
  );
}

function countCompiled(item: RecordedExplanation): [string, number][] {
  const sum = (numbers: readonly number[]): number => numbers.reduce((a, b) => a + b, 0);
  const computes = ({ kind }: { readonly kind: string }): boolean => kind !== "bookkeeping";
  return [
    ["graphs", item.graphs.length],
    ["ops", sum(item.graphs.map(({ ops }) => ops.filter(computes).length))],
    ["lines that break graphs", item.break_sites.length],
    ["graph breaks", sum(item.break_sites.map((site) => site.num_events))],
    ["recompilations", item.recompiles.length],
    ["functions that ran eagerly", item.skipped_frames.length],
    ["guards", sum(item.guards.map(({ guards }) => guards.length))],
  ];
}

/** Agreements of tensors that differ by noise, rounding or chance alone. */
const TOLERABLE: readonly string[] = ["equal", "close", "rounded", "random"];

function listProof({ parity = [], parallel = [] }: RecordedRun): Figure[] {
  const ofParity = parity.flatMap(({ axes, tensors }) => {
    const mesh = axes.map(({ name, size }) => `${name}=${size.toLocaleString("en")}`).join(" × ");
    const numFine = tensors.filter(({ agreement }) => TOLERABLE.includes(agreement)).length;
    return counts("proof", `parity on ${mesh}`, [
      ["tensors that differ", tensors.length - numFine],
      ["tensors that agree", numFine],
    ]);
  });
  const ofPrograms = parallel.flatMap(({ program, inserted, fallbacks }) =>
    counts("proof", program, [
      ["inserted collectives", inserted.length],
      ["ops that could not run sharded", fallbacks.length],
    ]),
  );
  return [...ofParity, ...ofPrograms];
}
