/** What a rank sends: the causes that send most, with their lines, and bytes by axis and phase. */
import type { CauseRow, Communication } from "../../page";
import { Bar } from "../../parts/bar";
import { heatColor } from "../../parts/colors";
import { ModuleLink } from "../../parts/module_link";
import { Panel } from "../../parts/panel";
import { SourceLine } from "../../parts/source_line";
import { Term } from "../../parts/term";
import { formatBytes, formatBytesCell, formatShare, pluralize } from "../../parts/units";
import { page } from "../../store/page";
import { hrefTo } from "../../store/route";

const NUM_CAUSES = 5;
const HOT_SHARE = 0.6; // above this the background is strong and the text light

export function TrafficOverview() {
  const { communication } = page.value;
  if (!communication?.cause_rows.length) return null;
  return (
    <>
      <Causes communication={communication} />
      <AxisPhases communication={communication} />
    </>
  );
}

function Causes({ communication }: { communication: Communication }) {
  const { cause_rows: rows, ranks } = communication;
  const total = Math.max(...ranks.map((row) => row.wire_bytes), 0);
  const shown = rows.slice(0, NUM_CAUSES);
  const max = Math.max(...shown.map((row) => row.wire_bytes));
  return (
    <Panel
      title="What sends most"
      note={
        <>
          of {formatBytes(total)} <Term word="wire bytes">sent</Term> by{" "}
          {ranks.length > 1 ? "the busiest rank" : "a rank"}
        </>
      }
      controls={
        <a class="text-button" href={hrefTo("communication")}>
          all {pluralize(rows.length, "cause")}
        </a>
      }
    >
      <ol class="top-causes">
        {shown.map((row, i) => (
          <Cause key={i} row={row} words={communication.causes[row.cause]!} {...{ max, total }} />
        ))}
      </ol>
    </Panel>
  );
}

interface CauseProps {
  readonly row: CauseRow;
  readonly words: string;
  readonly max: number;
  readonly total: number;
}

function Cause({ row, words, max, total }: CauseProps) {
  const [module] = row.modules;
  return (
    <li class="top-cause">
      <div class="top-cause-figures">
        <Bar
          value={row.wire_bytes}
          max={max}
          text={formatBytes(row.wire_bytes)}
          color={row.is_implicit ? "var(--warn)" : undefined}
        />
        <span class="top-cause-share">{formatShare(row.wire_bytes, total)}</span>
      </div>
      <div class="top-cause-words">
        <span>{row.is_implicit ? <Term word="implicit redistribution">{words}</Term> : words}</span>
        <span class="dim">
          {row.what} ×{row.count}
        </span>
        {module !== undefined && module >= 0 && (
          <span>
            <ModuleLink module={module} view="communication" />
            {row.modules.length > 1 && <span class="dim"> and {row.modules.length - 1} more</span>}
          </span>
        )}
        <SourceLine source={row.source} isShort />
      </div>
    </li>
  );
}

/** Bytes that a rank sends along each axis in each phase. */
function AxisPhases({ communication }: { communication: Communication }) {
  const { axes, phases, ranks, sums } = communication;
  const hasTotals = ranks.length === 1; // cells of different ranks do not add up
  const bytes = (axis: number, phase: number): number =>
    sums
      .filter((row) => (axis < 0 || row.axis === axis) && (phase < 0 || row.phase === phase))
      .reduce((sum, row) => sum + row.wire_bytes, 0);
  const usedAxes = [...axes.keys()].filter((axis) => sums.some((row) => row.axis === axis));
  const usedPhases = [...phases.keys()].filter((phase) => sums.some((row) => row.phase === phase));
  const max = Math.max(
    ...usedAxes.flatMap((axis) => usedPhases.map((phase) => bytes(axis, phase))),
  );
  return (
    <Panel
      title="Bytes by axis and phase"
      note={
        <>
          {hasTotals ? "sent per rank" : "sent by the busiest rank of each cell"},{" "}
          <Term word="ring estimate" />
        </>
      }
    >
      <div class="scroll-x">
        <table class="axis-phases">
          <thead>
            <tr>
              <th>
                <Term word="axis" />
              </th>
              {usedPhases.map((phase) => (
                <th key={phase} class="end">
                  {phases[phase]}
                </th>
              ))}
              {hasTotals && <th class="end">all</th>}
            </tr>
          </thead>
          <tbody>
            {usedAxes.map((axis) => (
              <tr key={axis}>
                <th scope="row">{axes[axis]}</th>
                {usedPhases.map((phase) => (
                  <Cell key={phase} value={bytes(axis, phase)} max={max} />
                ))}
                {hasTotals && <td class="end">{formatBytesCell(bytes(axis, -1))}</td>}
              </tr>
            ))}
            {hasTotals && usedAxes.length > 1 && (
              <tr>
                <th scope="row">all</th>
                {usedPhases.map((phase) => (
                  <td key={phase} class="end">
                    {formatBytesCell(bytes(-1, phase))}
                  </td>
                ))}
                <td class="end">{formatBytesCell(bytes(-1, -1))}</td>
              </tr>
            )}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

function Cell({ value, max }: { value: number; max: number }) {
  const share = max ? value / max : 0;
  const style = value
    ? { background: heatColor(share), color: share > HOT_SHARE ? "var(--heat-text)" : undefined }
    : undefined;
  return (
    <td class="end" style={style}>
      {formatBytesCell(value)}
    </td>
  );
}
