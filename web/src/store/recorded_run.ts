/**
 * A recording that was dropped onto the page, read from its own fields: what its collectives and its
 * memory sum up to. `recorded_figures.ts` has its figures of other views.
 */
import type { EarlierCurve, PeakRow, Traffic } from "../page";
import type { EarlierData } from "./earlier_data";
import { NO_PARTS } from "./figure_parts";

export const RECORDING_SCHEMA = 2;

/** The cause of a collective, by its type. */
type RecordedCause =
  | {
      readonly type: "redistribute";
      readonly before: readonly string[];
      readonly after: readonly string[];
      readonly asked_by: string;
      readonly is_implicit: boolean;
    }
  | { readonly type: "fully_shard"; readonly action: string }
  | { readonly type: "ddp_bucket" }
  | { readonly type: "call"; readonly api: string }
  | { readonly type: "compiled"; readonly graph: string }
  | {
      readonly type: "spmd_types";
      readonly function: string;
      readonly axis: string | null;
      readonly before: string;
      readonly after: string;
      readonly backward_of: string | null;
    };

interface RecordedCall {
  readonly rank: number;
  readonly kind: string;
  readonly axis: string | null;
  readonly num_ranks: number;
  readonly phase: string;
  readonly dtype: string;
  readonly owner: string | null;
  readonly cause?: RecordedCause | null;
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

export interface RecordedParameter {
  readonly axes: readonly string[];
  readonly placements: readonly string[];
  readonly is_annotated: boolean;
  readonly fsdp_group: string | null;
}

export interface RecordedExplanation {
  readonly rank: number;
  readonly target: string;
  readonly graphs: readonly { readonly ops: readonly { readonly kind: string }[] }[];
  readonly break_sites: readonly { readonly num_events: number }[];
  readonly recompiles: readonly unknown[];
  readonly skipped_frames: readonly unknown[];
  readonly guards: readonly { readonly guards: readonly string[] }[];
  readonly stages: readonly unknown[];
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
  readonly explanations?: readonly RecordedExplanation[];
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
    figure_parts: NO_PARTS,
    sizes: null,
  };
}

const NUM_KEYS = 7; // columns by which collectives are summed

/** A row for the collectives of a rank that differ only in their figures. */
function readCollectives({ collectives = [], run }: RecordedRun, modules: NameList) {
  const lists = { axes: new NameList(), kinds: new NameList(), phases: new NameList() };
  const [dtypes, ranks, causes] = [new NameList(), new NameList(), new NameList()];
  const rows = new Map<string, number[]>(); // the columns, count, input bytes and wire bytes
  for (const call of collectives) {
    const values = [
      ranks.at(String(call.rank)),
      lists.axes.at(nameAxis(call, run?.world_size ?? 0)),
      lists.kinds.at(call.kind),
      lists.phases.at(call.phase),
      call.owner === null || call.owner === undefined ? -1 : modules.at(call.owner),
      dtypes.at(call.dtype),
      causes.at(describeCause(call.cause ?? null)),
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
    cause: column(6),
    source: none,
    step: [],
    count: column(NUM_KEYS),
    input_bytes: column(NUM_KEYS + 1),
    wire_bytes: column(NUM_KEYS + 2),
  };
  return {
    axes: lists.axes.names,
    kinds: lists.kinds.names,
    phases: lists.phases.names,
    causes: causes.names,
    dtypes: dtypes.names,
    ranks: ranks.names.map((rank) => ({ ranks: rank, example: Number(rank), num_ranks: 1 })),
    traffic,
    num_steps: 0,
  };
}

/** As Python's `describe_cause`. */
function describeCause(cause: RecordedCause | null): string {
  switch (cause?.type) {
    case "redistribute": {
      const move = `redistribution ${cause.before.join(", ")} → ${cause.after.join(", ")}`;
      const op = cause.asked_by.replace(/\.default$/, "");
      return cause.is_implicit ? `implicit ${move}, required by ${op}` : `${move} for ${op}`;
    }
    case "fully_shard":
      return `FSDP ${cause.action}`;
    case "ddp_bucket":
      return "DDP gradient bucket";
    case "call":
      return `call of ${cause.api}`;
    case "compiled":
      return `compiled graph ${cause.graph}`;
    case "spmd_types": {
      const where = cause.axis === null ? "" : ` on ${cause.axis}`;
      const dual = cause.backward_of === null ? "" : `, backward of ${cause.backward_of}`;
      return `spmd_types ${cause.function} ${cause.before} → ${cause.after}${where}${dual}`;
    }
    default:
      return "unknown cause";
  }
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
