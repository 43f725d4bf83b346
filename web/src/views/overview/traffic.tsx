/** What a rank sends: the causes that send most, with their lines, and bytes by axis and phase. */
import { Bar } from "../../parts/bar";
import { heatColor, heatTextColor } from "../../parts/colors";
import { Breakable } from "../../parts/highlight";
import { ModuleLink } from "../../parts/module_link";
import { Panel } from "../../parts/panel";
import { SourceLine } from "../../parts/source_line";
import { Term } from "../../parts/term";
import { formatBytes, formatBytesCell, formatShare, pluralize } from "../../parts/units";
import { page } from "../../store/page";
import { hrefTo } from "../../store/route";
import { selectAll, selectedFacets, selectionHref } from "../../store/selection";
import { isOfSeveralRanks, selectedTraffic, sumRows } from "../../store/traffic";
import { type CauseRow, selectedCauses } from "../communication/cause_rows";

const NUM_CAUSES = 5;

export function TrafficOverview() {
  if (!page.value.communication?.traffic.count.length) return null;
  return (
    <>
      <Causes />
      <AxisPhases />
    </>
  );
}

function Causes() {
  const rows = selectedCauses.value
    .filter(({ count }) => count > 0)
    .sort((a, b) => b.wire_bytes - a.wire_bytes);
  const shown = rows.slice(0, NUM_CAUSES);
  const max = Math.max(0, ...shown.map(({ wire_bytes }) => wire_bytes));
  return (
    <Panel
      title="What sends most"
      note={
        <>
          of {formatBytes(selectedTraffic.value.wire_bytes)} <Term word="wire bytes">sent</Term> by{" "}
          {isOfSeveralRanks.value ? "the busiest rank" : "a rank"}
          {selectedFacets.value.length > 0 && " in what is selected"}
        </>
      }
      controls={
        <a class="text-button" href={hrefTo("communication")}>
          all {pluralize(rows.length, "cause")}
        </a>
      }
    >
      <ol class="top-causes">
        {shown.map((row) => (
          <Cause key={row.key} row={row} max={max} />
        ))}
      </ol>
    </Panel>
  );
}

interface CauseProps {
  readonly row: CauseRow;
  readonly max: number;
}

function Cause({ row, max }: CauseProps) {
  const words = page.value.communication!.causes[row.cause]!;
  const modules = row.modules.filter((module) => module >= 0);
  return (
    <li class="top-cause">
      <div class="top-cause-figures">
        <Bar
          value={row.wire_bytes}
          max={max}
          text={formatBytes(row.wire_bytes)}
          color={row.isImplicit ? "var(--warn)" : undefined}
        />
        <span class="top-cause-share">
          {formatShare(row.wire_bytes, selectedTraffic.value.wire_bytes)}
        </span>
      </div>
      <div class="top-cause-words">
        <a class="top-cause-link" href={selectionHref({ cause: words }, "communication")}>
          <Breakable text={words} />
        </a>
        {row.isImplicit && (
          <span class="tone-warn top-cause-implicit">
            <Term word="implicit redistribution">implicit</Term>
          </span>
        )}
        <span class="dim">
          {row.what} ×{row.count}
        </span>
        {modules.length > 0 && (
          <span>
            <ModuleLink module={modules[0]!} view="communication" />
            {modules.length > 1 && <span class="dim"> and {modules.length - 1} more</span>}
          </span>
        )}
        <SourceLine source={row.source} isShort />
      </div>
    </li>
  );
}

/** Bytes that a rank sends along each axis in each phase; a cell selects its collectives. */
function AxisPhases() {
  const { axes, phases } = page.value.communication!;
  const cells = sumRows(["axis", "phase"]);
  const usedAxes = sorted(cells.map(({ values }) => values[0]!));
  const usedPhases = sorted(cells.map(({ values }) => values[1]!));
  const max = Math.max(0, ...cells.map(({ wire_bytes }) => wire_bytes));
  const hasTotals = !isOfSeveralRanks.value; // cells of different ranks do not add up
  const sum = (axis: number, phase: number): number =>
    cells
      .filter(
        ({ values }) => (axis < 0 || values[0] === axis) && (phase < 0 || values[1] === phase),
      )
      .reduce((total, { wire_bytes }) => total + wire_bytes, 0);
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
                  <Term word={phases[phase]!} />
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
                  <Cell
                    key={phase}
                    value={sum(axis, phase)}
                    max={max}
                    onClick={() => selectAll({ axis: axes[axis]!, phase: phases[phase]! })}
                  />
                ))}
                {hasTotals && <td class="end">{formatBytesCell(sum(axis, -1))}</td>}
              </tr>
            ))}
            {hasTotals && usedAxes.length > 1 && (
              <tr>
                <th scope="row">all</th>
                {usedPhases.map((phase) => (
                  <td key={phase} class="end">
                    {formatBytesCell(sum(-1, phase))}
                  </td>
                ))}
                <td class="end">{formatBytesCell(sum(-1, -1))}</td>
              </tr>
            )}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

function sorted(positions: readonly number[]): number[] {
  return [...new Set(positions)].sort((a, b) => a - b);
}

interface CellProps {
  readonly value: number;
  readonly max: number;
  readonly onClick: () => void;
}

function Cell({ value, max, onClick }: CellProps) {
  const share = max ? value / max : 0;
  if (!value) return <td class="end dim">{formatBytesCell(0)}</td>;
  return (
    <td
      class="end"
      style={{
        background: heatColor(share),
        color: heatTextColor(share),
      }}
    >
      <button type="button" title="select these collectives in every view" onClick={onClick}>
        {formatBytesCell(value)}
      </button>
    </td>
  );
}
