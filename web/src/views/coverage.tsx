/** Which ops shard, and what blocks sharding. */
import "./coverage.css";
import { useCallback, useMemo } from "preact/hooks";
import type { LevelCoverage, OpRow } from "../page";
import { Badge, toneOf } from "../parts/badge";
import { Choices } from "../parts/choices";
import { Panel } from "../parts/panel";
import { type Column, Table } from "../parts/table";
import { formatBytesCell, formatCount, formatFlops, formatShare, pluralize } from "../parts/units";
import { isFoldedRowInSelection } from "../store/modules";
import { page } from "../store/page";
import { param, setParam } from "../store/route";
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

/** A bar of all ops by verdict, and buttons that filter by verdict. */
function Verdicts({ level }: { level: LevelCoverage }) {
  const numOps = level.counts.reduce((sum, count) => sum + count, 0);
  const requestedVerdict = param("verdict");
  return (
    <>
      <div class="verdict-bar" aria-hidden="true">
        {level.verdicts.map((verdict, i) => (
          <span
            key={verdict}
            class={`tone-${toneOf(verdict)}`}
            style={{ flexGrow: level.counts[i]! }}
          />
        ))}
      </div>
      <VerdictButtons level={level} numOps={numOps} requestedVerdict={requestedVerdict} />
    </>
  );
}

interface VerdictProps {
  readonly level: LevelCoverage;
  readonly numOps: number;
  readonly requestedVerdict: string | undefined;
}

function VerdictButtons({ level, numOps, requestedVerdict }: VerdictProps) {
  return (
    <div class="verdicts" role="group" aria-label="verdicts">
      {level.verdicts.map((verdict, i) => {
        const count = level.counts[i]!;
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
  const isShown = useCallback(
    (row: number) => !requestedVerdict || ops[row]!.verdict === requestedVerdict,
    [ops, requestedVerdict],
  );
  const modulesOf = useCallback((row: number) => ops[row]!.modules, [ops]);
  const sourcesOf = useCallback((row: number) => ops[row]!.sources, [ops]);
  return (
    <Panel title="Ops" note="The worst first. Click a row for what was tried and what to do.">
      <Table
        label="ops"
        numRows={ops.length}
        columns={columns}
        isShown={isShown}
        modules={modulesOf}
        sources={sourcesOf}
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
    { id: "op", title: "Op", width: 14, grow: 3, isWhole: true, value: (row) => ops[row]!.op },
    {
      id: "verdict",
      title: "Verdict",
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
  Component: Coverage,
};
