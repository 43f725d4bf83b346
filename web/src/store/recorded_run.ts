/**
 * A recording that was dropped onto the page, read from its own fields: what its collectives and its
 * memory sum up to, and figures with the names that Python gives those of a page. What takes more
 * than counting is not compared here, and the page says so (`NOT_COMPARED`).
 */
import type { EarlierCurve, Figure, PeakRow, Traffic } from "../page";
import type { EarlierData } from "./earlier_data";

export const RECORDING_SCHEMA = 2;

/** What a view's figures leave out; a command compares it. */
export const NOT_COMPARED: Readonly<Record<string, string>> = {
  communication: "causes of collectives",
  modules: "parameters of modules",
  sharding: "bytes of parameters",
  compiler: "compiled graphs and diagnoses",
};

interface RecordedCall {
  readonly rank: number;
  readonly kind: string;
  readonly axis: string | null;
  readonly num_ranks: number;
  readonly phase: string;
  readonly dtype: string;
  readonly owner: string | null;
  readonly input_bytes: number;
  readonly wire_bytes: number;
}

interface RecordedProfile {
  readonly rank: number;
  readonly peak_bytes: number;
  readonly first_peak_bytes: number | null;
  readonly reserved_bytes: number | null;
  readonly needed_bytes: number | null;
  readonly at_peak: readonly {
    readonly kind: string;
    readonly module: string | null;
    readonly num_bytes: number;
  }[];
}

interface RecordedParameter {
  readonly axes: readonly string[];
  readonly placements: readonly string[];
  readonly is_annotated: boolean;
  readonly fsdp_group: string | null;
}

/** The fields of a recording that are read; a file may lack any of them. */
export interface RecordedRun {
  readonly format?: string;
  readonly schema?: number;
  readonly run?: { readonly world_size: number };
  readonly modules?: readonly {
    readonly name: string;
    readonly type: string;
    readonly parameters: readonly RecordedParameter[];
  }[];
  readonly collectives?: readonly RecordedCall[];
  readonly findings?: readonly { readonly rule: string; readonly severity: string }[];
  readonly gaps?: readonly {
    readonly place: string;
    readonly fact: string;
    readonly is_loss: boolean;
  }[];
  readonly memory?: readonly RecordedProfile[];
  readonly coverage?: readonly {
    readonly rank: number;
    readonly level: string;
    readonly ops: readonly { readonly verdict: string }[];
  }[];
  readonly parity?: readonly {
    readonly axes: readonly { readonly name: string; readonly size: number }[];
    readonly tensors: readonly { readonly agreement: string }[];
  }[];
  readonly parallel?: readonly {
    readonly program: string;
    readonly inserted: readonly unknown[];
    readonly fallbacks: readonly unknown[];
  }[];
}

/** Distinct names, with their positions. */
class NameList {
  readonly names: string[] = [];
  private readonly positions = new Map<string, number>();

  at(name: string): number {
    const known = this.positions.get(name);
    if (known !== undefined) return known;
    this.positions.set(name, this.names.length);
    return this.names.push(name) - 1;
  }
}

export function readRecordedData(recording: RecordedRun): EarlierData {
  const modules = new NameList();
  for (const { name } of recording.modules ?? []) modules.at(name);
  const curves = (recording.memory ?? []).map((profile) => readCurve(profile, modules));
  curves.sort((a, b) => needs(b) - needs(a)); // as on a page, the rank that needs most comes first
  return {
    communication: recording.collectives?.length ? readCollectives(recording, modules) : null,
    memory: curves,
    modules: modules.names,
    sizes: null,
  };
}

const NUM_KEYS = 6; // columns by which collectives are summed

/** A row for the collectives of a rank that differ only in their figures. */
function readCollectives({ collectives = [], run }: RecordedRun, modules: NameList) {
  const lists = { axes: new NameList(), kinds: new NameList(), phases: new NameList() };
  const [dtypes, ranks] = [new NameList(), new NameList()];
  const rows = new Map<string, number[]>(); // the columns, count, input bytes and wire bytes
  for (const call of collectives) {
    const values = [
      ranks.at(String(call.rank)),
      lists.axes.at(nameAxis(call, run?.world_size ?? 0)),
      lists.kinds.at(call.kind),
      lists.phases.at(call.phase),
      call.owner === null || call.owner === undefined ? -1 : modules.at(call.owner),
      dtypes.at(call.dtype),
    ];
    const key = values.join();
    const row = rows.get(key) ?? [...values, 0, 0, 0];
    rows.set(key, row);
    row[NUM_KEYS]! += 1;
    row[NUM_KEYS + 1]! += call.input_bytes;
    row[NUM_KEYS + 2]! += call.wire_bytes;
  }
  // The rows of a rank follow each other, as on a page.
  const sorted = [...rows.values()].sort((a, b) => a[0]! - b[0]!);
  const column = (at: number): number[] => sorted.map((row) => row[at]!);
  const none = sorted.map(() => -1);
  const traffic: Traffic = {
    rank_set: column(0),
    axis: column(1),
    kind: column(2),
    phase: column(3),
    owner: column(4),
    dtype: column(5),
    cause: none,
    source: none,
    count: column(NUM_KEYS),
    input_bytes: column(NUM_KEYS + 1),
    wire_bytes: column(NUM_KEYS + 2),
  };
  return {
    axes: lists.axes.names,
    kinds: lists.kinds.names,
    phases: lists.phases.names,
    causes: [],
    dtypes: dtypes.names,
    ranks: ranks.names.map((rank) => ({ ranks: rank, example: Number(rank), num_ranks: 1 })),
    traffic,
  };
}

function nameAxis({ axis, num_ranks: numRanks }: RecordedCall, worldSize: number): string {
  return axis ?? (numRanks === worldSize ? "world" : `${numRanks} ranks`);
}

function readCurve(profile: RecordedProfile, modules: NameList): EarlierCurve {
  const kinds = new NameList();
  const atPeak: PeakRow[] = profile.at_peak.map(({ kind, module, num_bytes }) => ({
    kind: kinds.at(kind.replaceAll("_", " ")),
    module: module === null || module === undefined ? -1 : modules.at(module),
    num_bytes,
  }));
  return {
    ranks: String(profile.rank),
    kinds: kinds.names,
    peak_bytes: profile.peak_bytes,
    first_peak_bytes: profile.first_peak_bytes ?? null,
    reserved_bytes: profile.reserved_bytes ?? null,
    needed_bytes: profile.needed_bytes ?? null,
    at_peak: atPeak,
  };
}

/** The most bytes that a rank needs, which decides whose figures are shown. */
function needs({ peak_bytes, first_peak_bytes }: EarlierCurve): number {
  return Math.max(peak_bytes, first_peak_bytes ?? 0);
}

/** Figures of views other than communication and memory, which are summed from their data. */
export function listRecordedFigures(recording: RecordedRun): Figure[] {
  return [
    ...listFindings(recording),
    ...listModules(recording),
    ...listSharding(recording),
    ...listCoverage(recording),
    ...listProof(recording),
  ];
}

function counts(view: string, group: string, numbers: Iterable<[string, number]>): Figure[] {
  return [...numbers].map(([label, value]) => ({ view, group, label, unit: "count", value }));
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
