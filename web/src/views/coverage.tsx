/** Which ops shard, and what blocks sharding. */
import "./coverage.css";
import { useCallback, useMemo } from "preact/hooks";
import type { LevelCoverage, OpRow } from "../page";
import { Badge, toneOf } from "../parts/badge";
import { Choices } from "../parts/choices";
import { Panel } from "../parts/panel";
import { type Column, Table } from "../parts/table";
import { formatBytesCell, formatCount, formatFlops, formatShare, pluralize } from "../parts/units";
import { hasModuleSelection, isFoldedRowInSelection } from "../store/modules";
import { page } from "../store/page";
import { param, route, setParam } from "../store/route";
import {
  type Facet,
  isSourceSelected,
  selectedFacetName,
  selectedFacets,
  selection,
} from "../store/selection";
import { OpDetail } from "./coverage/op_detail";
import type { View } from "./view";

function Coverage() {
  const levels = page.value.coverage;
  const levelIndex = Math.min(Number(param("level") ?? 0) || 0, levels.length - 1);
  const level = levels[levelIndex]!;
  return (
    <>
      <Panel
        title="Ops by verdict"
        note={describe(level)}
        follows={FOLLOWED}
        controls={
          levels.length > 1 && (
            <Choices
              label="level"
              choices={levels.map((option, i) => ({
                id: String(i),
                title: option.level.replaceAll("_", " "),
              }))}
              value={String(levelIndex)}
              onChange={(id) => setParam("level", id === "0" ? null : id)}
            />
          )
        }
      >
        <Verdicts level={level} />
      </Panel>
      <Ops level={level} key={levelIndex} />
    </>
  );
}

function describe(level: LevelCoverage): string {
  const placements = level.has_plan
    ? "At the model's own placements"
    : "Every dim of every input was tried in turn";
  const world = page.value.run.world === "simulated" ? ", simulated" : "";
  return `${placements}, on a mesh of ${level.mesh}${world}. The verdict on an op is the worst of all its calls.`;
}

/** What ops can be filtered by: where they are called, and whether in forward or in backward. */
const FOLLOWED: readonly Facet[] = ["module", "line", "phase"];

function isOpSelected({ modules, sources, num_forward, num_backward }: OpRow): boolean {
  const phase = selectedFacetName("phase");
  const isCalled: Readonly<Record<string, boolean>> = {
    forward: num_forward > 0,
    backward: num_backward > 0,
  };
  return (
    (!hasModuleSelection.value || modules.some(isFoldedRowInSelection)) &&
    (!selection.value.line || sources.some(isSourceSelected)) &&
    (phase === null || isCalled[phase] === true)
  );
}

/** The selected ops of each verdict. */
function countVerdicts({ verdicts, counts, ops }: LevelCoverage): readonly number[] {
  if (!selectedFacets.value.some((facet) => FOLLOWED.includes(facet))) return counts;
  const selected = ops.filter(isOpSelected);
  return verdicts.map((verdict) => selected.filter((op) => op.verdict === verdict).length);
}

/** A bar of all selected ops by verdict, and buttons that filter by verdict. */
function Verdicts({ level }: { level: LevelCoverage }) {
  const counts = countVerdicts(level);
  const numOps = counts.reduce((sum, count) => sum + count, 0);
  const requestedVerdict = param("verdict");
  if (!numOps) return <p class="verdicts-none">No op is in what is selected.</p>;
  return (
    <>
      <div class="verdict-bar" aria-hidden="true">
        {level.verdicts.map((verdict, i) => (
          <span key={verdict} class={`tone-${toneOf(verdict)}`} style={{ flexGrow: counts[i]! }} />
        ))}
      </div>
      <VerdictButtons {...{ level, counts, numOps, requestedVerdict }} />
    </>
  );
}

interface VerdictProps {
  readonly level: LevelCoverage;
  readonly counts: readonly number[];
  readonly numOps: number;
  readonly requestedVerdict: string | undefined;
}

function VerdictButtons({ level, counts, numOps, requestedVerdict }: VerdictProps) {
  return (
    <div class="verdicts" role="group" aria-label="verdicts">
      {level.verdicts.map((verdict, i) => {
        const count = counts[i]!;
        if (!count) return null;
        return (
          <button
            type="button"
            key={verdict}
            class={`verdict tone-${toneOf(verdict)}`}
            aria-pressed={requestedVerdict === verdict}
            title={`${pluralize(count, "op")} ${verdict}, ${formatShare(count, numOps)}`}
            onClick={() => setParam("verdict", requestedVerdict === verdict ? null : verdict)}
          >
            <b>{count}</b> {verdict} <span class="dim">{formatShare(count, numOps)}</span>
          </button>
        );
      })}
    </div>
  );
}

function Ops({ level }: { level: LevelCoverage }) {
  const { ops } = level;
  const columns = useMemo(() => makeColumns(ops), [ops]);
  const requestedVerdict = param("verdict");
  const { params } = route.value;
  const isShown = useCallback(
    (row: number) =>
      (!requestedVerdict || ops[row]!.verdict === requestedVerdict) && isOpSelected(ops[row]!),
    [ops, requestedVerdict, params],
  );
  const modulesOf = useCallback((row: number) => ops[row]!.modules, [ops]);
  return (
    <Panel
      title="Ops"
      note="The worst first; figures of an op are of all its calls. Click a row for what was tried and what to do."
      follows={FOLLOWED}
    >
      <Table
        label="ops"
        numRows={ops.length}
        columns={columns}
        isShown={isShown}
        modules={modulesOf}
        isSelected={isFoldedRowInSelection}
        detail={(row) => <OpDetail op={ops[row]!} />}
        empty="The model has no ops at this level."
        height="min(70vh, 60rem)"
      />
    </Panel>
  );
}

function makeColumns(ops: readonly OpRow[]): Column[] {
  return [
    { id: "op", title: "Op", width: 14, grow: 3, isNeverCut: true, value: (row) => ops[row]!.op },
    {
      id: "verdict",
      title: "Verdict",
      narrowPlace: 1,
      width: 9.5,
      value: (row) => ops[row]!.verdict,
      cell: (row) => <Badge word={ops[row]!.verdict} />,
    },
    {
      id: "forward",
      title: "Forward",
      hint: "calls in forward",
      width: 6,
      align: "end",
      value: (row) => ops[row]!.num_forward,
      cell: (row) => formatCount(ops[row]!.num_forward),
    },
    {
      id: "backward",
      title: "Backward",
      hint: "calls in backward",
      width: 6.5,
      align: "end",
      value: (row) => ops[row]!.num_backward,
      cell: (row) => formatCount(ops[row]!.num_backward),
    },
    {
      id: "flops",
      title: "Work",
      hint: "floating-point operations of all its calls; – where torch has no formula",
      width: 7.5,
      align: "end",
      value: (row) => ops[row]!.flops ?? -1,
      cell: (row) => formatWork(ops[row]!.flops),
    },
    {
      id: "moved",
      title: "Moved",
      hint: "bytes that a rank sends before the op can run",
      width: 7,
      align: "end",
      value: (row) => ops[row]!.moved_bytes,
      cell: (row) => formatBytesCell(ops[row]!.moved_bytes),
    },
    {
      id: "detail",
      title: "Why, and what to do",
      width: 16,
      grow: 5,
      value: (row) => ops[row]!.detail || ops[row]!.remedy,
    },
  ];
}

function formatWork(flops: number | null): string {
  if (flops === null) return "–";
  return flops ? formatFlops(flops) : "·";
}

export const view: View = {
  id: "coverage",
  title: "Coverage",
  hasData: (page) => page.coverage.length > 0,
  empty: "Op coverage was not recorded.",
  command: "shardscope coverage TARGET --mesh tp=4 -o recording.json",
  params: ({ coverage }) => ({
    level: coverage.map((_, i) => String(i)),
    verdict: [...new Set(coverage.flatMap(({ verdicts }) => verdicts))],
  }),
  Component: Coverage,
};
