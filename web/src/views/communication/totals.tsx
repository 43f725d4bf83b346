/** Collectives of the busiest rank by mesh axis and kind; clicking a cell filters the panels below. */
import type { Communication } from "../../page";
import { Choices } from "../../parts/choices";
import { heatColor, seriesColor } from "../../parts/colors";
import { Panel } from "../../parts/panel";
import { tip } from "../../parts/tooltip";
import { formatBytesCell, formatCount, formatShare } from "../../parts/units";
import { selected } from "../../store/modules";
import { changeRoute, navigate, param, route, setParam } from "../../store/route";
import { type Cell, type Facets, fillCell, type Measure, usedPositions } from "./facets";

const HOT_SHARE = 0.6; // above this the background is strong and the text light

/** Phases take colours from the end of the list, since kinds take them from the start. */
export function colorOfPhase(phase: number): string {
  return seriesColor(7 - phase);
}

interface Props {
  readonly communication: Communication;
  readonly facets: Facets;
}

export function Totals({ communication, facets }: Props) {
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
      <Grid communication={communication} facets={facets} measure={measure} />
      <PhaseChoices communication={communication} facets={facets} />
    </Panel>
  );
}

/** The legend of phases; clicking a phase filters by it. */
function PhaseChoices({ communication, facets }: Props) {
  const used = usedPositions(communication, "phase");
  if (used.length < 2) return null;
  return (
    <div class="totals-phases">
      <div class="choices" role="group" aria-label="phase">
        {[-1, ...used].map((phase) => (
          <button
            type="button"
            key={phase}
            aria-pressed={phase === facets.phase}
            onClick={() => setParam("phase", communication.phases[phase] ?? null)}
          >
            {phase >= 0 && <span class="swatch" style={{ background: colorOfPhase(phase) }} />}
            {communication.phases[phase] ?? "all phases"}
          </button>
        ))}
      </div>
    </div>
  );
}

function describe({ ranks, scope }: Communication, measure: Measure): string {
  const whose = ranks.length > 1 ? "of the busiest rank" : "per rank";
  const what = measure === "bytes" ? "Bytes sent (ring estimate)" : "Collectives";
  const facts = [selected.value >= 0 && "all modules", scope].filter(Boolean).join(", ");
  return `${what} ${whose}${facts && `; ${facts}`}. Click a cell to filter the panels below.`;
}

function Grid({ communication, facets, measure }: Props & { readonly measure: Measure }) {
  const axes = usedPositions(communication, "axis");
  const kinds = usedPositions(communication, "kind");
  const sumCell = (axis: number, kind: number): Cell =>
    fillCell(communication, { axis, kind, phase: facets.phase }, measure);
  const max = Math.max(
    0,
    ...axes.flatMap((axis) => kinds.map((kind) => sumCell(axis, kind).value)),
  );
  const renderCell = (axis: number, kind: number) => (
    <td key={kind}>
      <TotalButton
        communication={communication}
        facets={facets}
        cell={sumCell(axis, kind)}
        measure={measure}
        max={axis < 0 || kind < 0 ? 0 : max}
      />
    </td>
  );
  return (
    <div class="scroll-x totals">
      <table aria-label="totals by mesh axis and kind">
        <thead>
          <tr>
            <th scope="col">axis</th>
            {kinds.map((kind) => (
              <th key={kind} scope="col">
                <span class="swatch" style={{ background: seriesColor(kind) }} />
                {communication.kinds[kind]}
              </th>
            ))}
            {kinds.length > 1 && <th scope="col">all kinds</th>}
          </tr>
        </thead>
        <tbody>
          {axes.map((axis) => (
            <tr key={axis}>
              <th scope="row">
                <span class="clip" title={communication.axes[axis]}>
                  {nameAxis(communication, axis)}
                </span>
              </th>
              {kinds.map((kind) => renderCell(axis, kind))}
              {kinds.length > 1 && renderCell(axis, -1)}
            </tr>
          ))}
          {axes.length > 1 && (
            <tr>
              <th scope="row">all axes</th>
              {kinds.map((kind) => renderCell(-1, kind))}
              {kinds.length > 1 && renderCell(-1, -1)}
            </tr>
          )}
        </tbody>
      </table>
    </div>
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

function TotalButton({ communication, facets, cell, measure, max }: TotalProps) {
  const { axes, kinds, ranks } = communication;
  const format = measure === "bytes" ? formatBytesCell : formatCount;
  if (!cell.numSums) return <span class="figure figure-none">·</span>;
  const isSelected = facets.axis === cell.axis && facets.kind === cell.kind;
  const isAll = cell.axis < 0 && cell.kind < 0;
  const share = max > 0 ? cell.value / max : 0;
  // Each phase's figure is of the rank that sent most in it, which may be different ranks.
  const sign = ranks.length > 1 && cell.numSums > 1 ? "≤ " : "";
  const toggleFilter = (): void => {
    const isClearing = isSelected || isAll;
    const changes = {
      axis: isClearing || cell.axis < 0 ? null : axes[cell.axis]!,
      kind: isClearing || cell.kind < 0 ? null : kinds[cell.kind]!,
    };
    navigate(changeRoute(route.value, route.value.view, changes), { isReplacing: true });
  };
  return (
    <button
      type="button"
      class={`figure${share > HOT_SHARE ? " figure-hot" : ""}${max ? "" : " figure-sum"}`}
      style={{ background: max ? heatColor(share) : undefined }}
      aria-pressed={isSelected && !isAll}
      aria-label={`${nameCell(communication, cell)}: ${sign}${format(cell.value)}`}
      onClick={toggleFilter}
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
