/** Collectives of the busiest rank by mesh axis and kind; a cell filters all that is below. */
import type { Communication } from "../../page";
import { Choices } from "../../parts/choice";
import { colorOf, heatOf } from "../../parts/colors";
import { Panel } from "../../parts/panel";
import { tip } from "../../parts/tooltip";
import { formatBytesCell, formatCount, formatShare } from "../../parts/units";
import { selected } from "../../store/modules";
import { changeRoute, navigate, param, route, setParam } from "../../store/route";
import { type Cell, type Facets, fillCell, type Measure, usedPositions } from "./facets";

const HOT_SHARE = 0.6; // from here on the ground is strong, and text light

/** Phases have the colours from the end of the list, since kinds have those from its start. */
export function colorOfPhase(phase: number): string {
  return colorOf(7 - phase);
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

/** The legend of phases, which also filters by one of them. */
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
  return `${what} ${whose}${facts && `; ${facts}`}. Click one to filter what is below.`;
}

function Grid({ communication, facets, measure }: Props & { readonly measure: Measure }) {
  const axes = usedPositions(communication, "axis");
  const kinds = usedPositions(communication, "kind");
  const fill = (axis: number, kind: number): Cell =>
    fillCell(communication, { axis, kind, phase: facets.phase }, measure);
  const most = Math.max(0, ...axes.flatMap((axis) => kinds.map((kind) => fill(axis, kind).value)));
  const draw = (axis: number, kind: number) => (
    <td key={kind}>
      <Figure
        communication={communication}
        facets={facets}
        cell={fill(axis, kind)}
        measure={measure}
        most={axis < 0 || kind < 0 ? 0 : most}
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
                <span class="swatch" style={{ background: colorOf(kind) }} />
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
              {kinds.map((kind) => draw(axis, kind))}
              {kinds.length > 1 && draw(axis, -1)}
            </tr>
          ))}
          {axes.length > 1 && (
            <tr>
              <th scope="row">all axes</th>
              {kinds.map((kind) => draw(-1, kind))}
              {kinds.length > 1 && draw(-1, -1)}
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

interface FigureProps extends Props {
  readonly cell: Cell;
  readonly measure: Measure;
  readonly most: number; // of all cells; 0 where this one adds up others
}

function Figure({ communication, facets, cell, measure, most }: FigureProps) {
  const { axes, kinds, ranks } = communication;
  const format = measure === "bytes" ? formatBytesCell : formatCount;
  if (!cell.numSums) return <span class="figure figure-none">·</span>;
  const isChosen = facets.axis === cell.axis && facets.kind === cell.kind;
  const isAll = cell.axis < 0 && cell.kind < 0;
  const share = most > 0 ? cell.value / most : 0;
  // Each phase's figure is of the rank that sent most in it, and those may be two.
  const sign = ranks.length > 1 && cell.numSums > 1 ? "≤ " : "";
  const choose = (): void => {
    const isOff = isChosen || isAll;
    const changes = {
      axis: isOff || cell.axis < 0 ? null : axes[cell.axis]!,
      kind: isOff || cell.kind < 0 ? null : kinds[cell.kind]!,
    };
    navigate(changeRoute(route.value, route.value.view, changes), { isReplacing: true });
  };
  return (
    <button
      type="button"
      class={`figure${share > HOT_SHARE ? " figure-hot" : ""}${most ? "" : " figure-sum"}`}
      style={{ background: most ? heatOf(share) : undefined }}
      aria-pressed={isChosen && !isAll}
      aria-label={`${nameCell(communication, cell)}: ${sign}${format(cell.value)}`}
      onClick={choose}
      {...tip(() => <FigureTip communication={communication} cell={cell} format={format} />)}
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

interface FigureTipProps {
  readonly communication: Communication;
  readonly cell: Cell;
  readonly format: (value: number) => string;
}

function FigureTip({ communication, cell, format }: FigureTipProps) {
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
