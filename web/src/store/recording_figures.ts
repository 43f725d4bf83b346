/** Figures of a recording from its own fields, with the names that Python gives those of a page. */
import type { Figure } from "../page";

interface RecordedCall {
  readonly rank: number;
  readonly kind: string;
  readonly axis: string | null;
  readonly num_ranks: number;
  readonly phase: string;
  readonly wire_bytes: number;
}

interface RecordedProfile {
  readonly peak_bytes: number;
  readonly first_peak_bytes: number | null;
  readonly reserved_bytes: number | null;
  readonly needed_bytes: number | null;
  readonly at_peak: readonly { readonly kind: string; readonly num_bytes: number }[];
}

/** The fields of a recording that are read; a file may lack any of them. */
export interface RecordedRun {
  readonly format?: string;
  readonly run?: { readonly world_size: number };
  readonly collectives?: readonly RecordedCall[];
  readonly memory?: readonly RecordedProfile[];
}

const SENT = "bytes sent per rank (ring estimate)";
const ISSUED = "collectives per rank";

export function listRecordingFigures(recording: RecordedRun): Figure[] {
  return [...listTraffic(recording), ...listMemory(recording)];
}

function nameAxis({ axis, num_ranks: numRanks }: RecordedCall, worldSize: number): string {
  return axis ?? (numRanks === worldSize ? "world" : `${numRanks} ranks`);
}

/** Sums of each rank; the figure is that of the rank that sends most. */
function listTraffic({ collectives = [], run }: RecordedRun): Figure[] {
  const sums = new Map<string, Map<number, [number, number]>>();
  for (const call of collectives) {
    const groups = [
      ["", "all"],
      ["", `${call.kind}[${nameAxis(call, run?.world_size ?? 0)}]`],
      [", by phase", call.phase],
    ];
    for (const group of groups) {
      const key = JSON.stringify(group);
      const byRank = sums.get(key) ?? new Map<number, [number, number]>();
      sums.set(key, byRank);
      const [wireBytes, count] = byRank.get(call.rank) ?? [0, 0];
      byRank.set(call.rank, [wireBytes + call.wire_bytes, count + 1]);
    }
  }
  return [...sums].flatMap(([key, byRank]): Figure[] => {
    const [by, label] = JSON.parse(key) as [string, string];
    const [wireBytes, count] = [...byRank.values()].reduce((most, sum) =>
      sum[0] > most[0] || (sum[0] === most[0] && sum[1] > most[1]) ? sum : most,
    );
    return [
      { view: "communication", group: SENT + by, label, unit: "bytes", value: wireBytes },
      { view: "communication", group: ISSUED + by, label, unit: "count", value: count },
    ];
  });
}

function listMemory({ memory = [] }: RecordedRun): Figure[] {
  const worst = memory.reduce<RecordedProfile | null>(
    (most, profile) => (most === null || needs(profile) > needs(most) ? profile : most),
    null,
  );
  if (!worst) return [];
  const figure = (group: string, label: string, value: number | null): Figure[] =>
    value === null ? [] : [{ view: "memory", group, label, unit: "bytes", value }];
  const kinds = new Map<string, number>();
  for (const { kind, num_bytes: numBytes } of worst.at_peak) {
    kinds.set(kind, (kinds.get(kind) ?? 0) + numBytes);
  }
  return [
    ...figure("most on a rank", "peak of a step", worst.peak_bytes),
    ...figure("most on a rank", "peak of the first step", worst.first_peak_bytes),
    ...figure("most on a rank", "reserved", worst.reserved_bytes),
    ...figure("most on a rank", "needed on a device", worst.needed_bytes),
    ...[...kinds].flatMap(([kind, numBytes]) =>
      figure("in use at the peak", kind.replaceAll("_", " "), numBytes),
    ),
  ];
}

/** The most bytes that a rank needs, which decides whose figures are shown. */
function needs(profile: RecordedProfile): number {
  return Math.max(profile.peak_bytes, profile.first_peak_bytes ?? 0);
}
