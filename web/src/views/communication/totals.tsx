/**
 * Collectives of the busiest rank by mesh axis and kind; clicking a cell selects them in every view.
 * On a narrow screen the more numerous are the rows.
 */
import type { Communication } from "../../page";
import { Choices } from "../../parts/choices";
import { facetColor, heatColor, heatTextColor, seriesColor } from "../../parts/colors";
import { Breakable } from "../../parts/highlight";
import { isNarrow } from "../../parts/narrow";
import { Panel } from "../../parts/panel";
import { tip } from "../../parts/tooltip";
import { formatBytesCell, formatCount, formatShare } from "../../parts/units";
import { param, setParam } from "../../store/route";
import { select, selectAll, selectedFacets, selection } from "../../store/selection";
import { isOfSeveralRanks } from "../../store/traffic";
import { type Cell, fillCell, type Measure, sumFacets, usedPositions } from "./facets";

/** Phases take colours from the end of the list, since kinds take them from the start. */
export function colorOfPhase(phase: number): string {
  return seriesColor(7 - phase);
}

interface Props {
  readonly communication: Communication;
}

export function Totals({ communication }: Props) {
  const measure: Measure = param("show") === "counts" ? "counts" : "bytes";
  return (
    <Panel
      title="By mesh axis and kind"
      note={describe(communication, measure)}
      controls={
        <Choices
          label="figures"
          choices={[
            { id: "bytes", title: "Bytes", hint: "bytes sent (ring estimate)" },
            { id: "counts", title: "Counts", hint: "collectives" },
          ]}
          value={measure}
          onChange={(id) => setParam("show", id === "bytes" ? null : id)}
        />
      }
    >
      <Grid communication={communication} measure={measure} />
      <PhaseChoices communication={communication} />
    </Panel>
  );
}

/** The legend of phases; clicking a phase selects it. */
function PhaseChoices({ communication }: Props) {
  const used = usedPositions(communication.traffic, "phase");
  if (used.length < 2) return null;
  return (
    <div class="totals-phases">
      <div class="choices" role="group" aria-label="phase">
        {[-1, ...used].map((phase) => (
          <button
            type="button"
            key={phase}
            aria-pressed={phase === selection.value.phase}
            onClick={() => select("phase", communication.phases[phase] ?? null)}
          >
            {phase >= 0 && <span class="swatch" style={{ background: colorOfPhase(phase) }} />}
            {communication.phases[phase] ?? "all phases"}
          </button>
        ))}
      </div>
    </div>
  );
}

function describe({ scope }: Communication, measure: Measure): string {
  const what = measure === "bytes" ? "Bytes sent (ring estimate)" : "Collectives";
  const facts = [selectedFacets.value.length > 0 && "of what is selected", scope];
  const words = [`${what} ${nameRank()}`, ...facts].filter(Boolean).join("; ");
  return `${words}. Click a cell to select it in every view.`;
}

/** Whose figures are shown. */
export function nameRank(): string {
  const { rank } = selection.value;
  if (rank >= 0) return `of rank ${rank}`;
  return isOfSeveralRanks.value ? "of the busiest rank" : "per rank";
}

function Grid({ communication, measure }: Props & { readonly measure: Measure }) {
  const axes = usedPositions(communication.traffic, "axis");
  const kinds = usedPositions(communication.traffic, "kind");
  const sums = sumFacets();
  const sumCell = (axis: number, kind: number): Cell => fillCell(sums, axis, kind, measure);
  const max = Math.max(
    0,
    ...axes.flatMap((axis) => kinds.map((kind) => sumCell(axis, kind).value)),
  );
  const isTransposed = isNarrow.value && kinds.length > axes.length;
  const rows = isTransposed ? kinds : axes;
  const columns = isTransposed ? axes : kinds;
  const withSum = (positions: readonly number[]): readonly number[] =>
    positions.length > 1 ? [...positions, -1] : positions;
  const nameOf = (position: number, isKind: boolean) =>
    isKind ? (
      <KindName communication={communication} kind={position} />
    ) : (
      <span class="clip" title={communication.axes[position]}>
        {position < 0 ? "all axes" : nameAxis(communication, position)}
      </span>
    );
  return (
    <div class="scroll-x totals">
      <table aria-label="totals by mesh axis and kind">
        <thead>
          <tr>
            <th scope="col">{isTransposed ? "kind" : "axis"}</th>
            {withSum(columns).map((column) => (
              <th key={column} scope="col">
                {nameOf(column, !isTransposed)}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {withSum(rows).map((row) => (
            <tr key={row}>
              <th scope="row">{nameOf(row, isTransposed)}</th>
              {withSum(columns).map((column) => {
                const [axis, kind] = isTransposed ? [column, row] : [row, column];
                return (
                  <td key={column}>
                    <TotalButton
                      communication={communication}
                      cell={sumCell(axis, kind)}
                      measure={measure}
                      max={axis < 0 || kind < 0 ? 0 : max}
                    />
                  </td>
                );
              })}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function KindName({ communication, kind }: Props & { readonly kind: number }) {
  if (kind < 0) return <>all kinds</>;
  const name = communication.kinds[kind]!;
  return (
    <>
      <span class="swatch" style={{ background: facetColor("kind", name, kind) }} />
      <Breakable text={name} />
    </>
  );
}

export function nameAxis({ axes }: Communication, axis: number): string {
  return axes[axis] || "no axis";
}

interface TotalProps extends Props {
  readonly cell: Cell;
  readonly measure: Measure;
  readonly max: number; // of all cells; 0 for cells that are sums of others
}

function TotalButton({ communication, cell, measure, max }: TotalProps) {
  const { axes, kinds } = communication;
  const facets = selection.value;
  const format = measure === "bytes" ? formatBytesCell : formatCount;
  if (!cell.numSums) return <span class="figure figure-none">·</span>;
  const isSelected = facets.axis === cell.axis && facets.kind === cell.kind;
  const isAll = cell.axis < 0 && cell.kind < 0;
  const share = max > 0 ? cell.value / max : 0;
  const isOutside =
    (cell.axis >= 0 && facets.axis >= 0 && facets.axis !== cell.axis) ||
    (cell.kind >= 0 && facets.kind >= 0 && facets.kind !== cell.kind);
  // Each phase's figure is of the rank that sent most in it, which may be different ranks.
  const sign = isOfSeveralRanks.value && cell.numSums > 1 ? "≤ " : "";
  const toggle = (): void => {
    const isClearing = isSelected || isAll;
    selectAll({
      axis: isClearing || cell.axis < 0 ? null : axes[cell.axis]!,
      kind: isClearing || cell.kind < 0 ? null : kinds[cell.kind]!,
    });
  };
  const classes = ["figure", !max && "figure-sum", isOutside && "figure-outside"];
  return (
    <button
      type="button"
      class={classes.filter(Boolean).join(" ")}
      style={max && !isOutside ? { background: heatColor(share), color: heatTextColor(share) } : {}}
      aria-pressed={isSelected && !isAll}
      aria-label={`${nameCell(communication, cell)}: ${sign}${format(cell.value)}`}
      onClick={toggle}
      {...tip(() => <TotalTip communication={communication} cell={cell} format={format} />)}
    >
      <span>
        {sign}
        {format(cell.value)}
      </span>
      {facets.phase < 0 && <Phases cell={cell} />}
    </button>
  );
}

function nameCell(communication: Communication, { axis, kind }: Cell): string {
  const what = kind < 0 ? "all kinds" : communication.kinds[kind];
  return `${what} on ${axis < 0 ? "all axes" : nameAxis(communication, axis)}`;
}

function Phases({ cell }: { cell: Cell }) {
  return (
    <span class="figure-phases" aria-hidden="true">
      {cell.phases.map(
        (value, phase) =>
          value > 0 && (
            <span key={phase} style={{ flexGrow: value, background: colorOfPhase(phase) }} />
          ),
      )}
    </span>
  );
}

interface TotalTipProps {
  readonly communication: Communication;
  readonly cell: Cell;
  readonly format: (value: number) => string;
}

function TotalTip({ communication, cell, format }: TotalTipProps) {
  return (
    <>
      <div class="tooltip-title">{nameCell(communication, cell)}</div>
      <dl>
        {cell.phases.map(
          (value, phase) =>
            value > 0 && (
              <>
                <dt>
                  <span class="swatch" style={{ background: colorOfPhase(phase) }} />
                  {communication.phases[phase]}
                </dt>
                <dd>
                  {format(value)} <span class="dim">{formatShare(value, cell.value)}</span>
                </dd>
              </>
            ),
        )}
      </dl>
    </>
  );
}
