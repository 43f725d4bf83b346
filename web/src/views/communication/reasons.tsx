/** Causes with their collectives, the most expensive first. */
import { useCallback, useMemo } from "preact/hooks";
import type { CauseRow, Communication } from "../../page";
import { Badge } from "../../parts/badge";
import { Bar } from "../../parts/bar";
import { Highlight } from "../../parts/highlight";
import { ModuleLink } from "../../parts/module_link";
import { Panel } from "../../parts/panel";
import { placeOf, SourceLine } from "../../parts/source_line";
import { type Column, Table } from "../../parts/table";
import { countOf, formatBytes, formatCount, formatNumber } from "../../parts/units";
import { nameOf, representatives, selected } from "../../store/modules";
import { type Facets, markReasons } from "./facets";

const MAX_MODULES = 24;

interface Props {
  readonly communication: Communication;
  readonly facets: Facets;
}

export function Reasons({ communication, facets }: Props) {
  const { reasons } = communication;
  const columns = useMemo(() => makeColumns(communication), [communication]);
  const { axis, kind, phase } = facets;
  const isShown = useMemo(() => {
    const marks = markReasons(communication, { axis, kind, phase });
    return (row: number): boolean => marks[row]!;
  }, [communication, axis, kind, phase]);
  const modulesOf = useCallback((row: number) => reasons[row]!.modules, [reasons]);
  return (
    <Panel title="Causes" note={describe(communication, facets)}>
      <Table
        label="causes"
        numRows={reasons.length}
        columns={columns}
        isShown={isShown}
        modules={modulesOf}
        detail={(row) => <Reason communication={communication} reason={reasons[row]!} />}
        empty="No collective was recorded, so none has a cause."
        height="24rem"
      />
    </Panel>
  );
}

function describe({ ranks, scope }: Communication, facets: Facets): string {
  const facts = [
    ranks.length > 1 ? "of the busiest rank" : "per rank",
    selected.value >= 0 && "all modules",
    facets.phase >= 0 && "all phases",
    scope,
  ];
  return `The most expensive first; figures: ${facts.filter(Boolean).join(", ")}. Click a row for its line and modules.`;
}

function makeColumns({ reasons, causes }: Communication): Column[] {
  const at = (row: number): CauseRow => reasons[row]!;
  const most = Math.max(0, ...reasons.map((one) => one.wire_bytes));
  return [
    {
      id: "cause",
      title: "Cause",
      width: 22,
      grow: 4,
      isText: true,
      value: (row) => causes[at(row).words]!,
      cell: (row) => (
        <span class="cause">
          {at(row).is_implicit && <Badge word="implicit" tone="warn" />}
          <span class="clip" title={causes[at(row).words]}>
            <Highlight text={causes[at(row).words]!} />
          </span>
        </span>
      ),
    },
    { id: "what", title: "What", width: 11, grow: 1, isText: true, value: (row) => at(row).what },
    {
      id: "count",
      title: "Count",
      width: 5,
      align: "end",
      value: (row) => at(row).count,
      cell: (row) => formatCount(at(row).count),
    },
    {
      id: "wire",
      title: "Sent",
      width: 10,
      grow: 1,
      align: "end",
      value: (row) => at(row).wire_bytes,
      cell: (row) => (
        <Bar value={at(row).wire_bytes} most={most} text={formatBytes(at(row).wire_bytes)} />
      ),
    },
    {
      id: "modules",
      title: "Modules",
      width: 10,
      grow: 2,
      isText: true,
      value: (row) => at(row).modules.map(nameOf).join("\n"),
      cell: (row) => <FirstModule modules={at(row).modules} />,
    },
    {
      id: "line",
      title: "Line",
      width: 10,
      grow: 2,
      isText: true,
      value: (row) => placeOf(at(row).source),
      cell: (row) => (
        <span class="clip">
          <SourceLine source={at(row).source} isShort />
        </span>
      ),
    },
  ];
}

function FirstModule({ modules }: { modules: readonly number[] }) {
  if (!modules.length) return null;
  return (
    <span class="clip">
      <ModuleLink module={modules[0]!} />
      {modules.length > 1 && <span class="dim"> and {formatNumber(modules.length - 1)} more</span>}
    </span>
  );
}

interface Folded {
  readonly module: number; // the first of them
  readonly count: number;
}

/** Modules that are alike once, and how many there are. */
export function foldModules(modules: readonly number[], likes: ArrayLike<number>): Folded[] {
  const found = new Map<number, { module: number; count: number }>();
  for (const module of modules) {
    const like = module < 0 ? -1 : likes[module]!;
    const known = found.get(like);
    if (!known) found.set(like, { module, count: 1 });
    else {
      known.count++;
      known.module = Math.min(known.module, module);
    }
  }
  return [...found.values()];
}

function Reason({ communication, reason }: { communication: Communication; reason: CauseRow }) {
  const folded = foldModules(reason.modules, representatives.value);
  const more = folded.length - MAX_MODULES;
  return (
    <div class="op-detail">
      <p class="cause-head">
        {reason.is_implicit && <Badge word="implicit" tone="warn" />}
        <b class="wrap">{communication.causes[reason.words]}</b>
      </p>
      {reason.is_implicit && (
        <p>No plan and no call asked for it: DTensor inserted it so that an op could run.</p>
      )}
      <p>
        <span class="mono">{reason.what}</span>, {formatNumber(reason.count)} times on a rank,{" "}
        {formatBytes(reason.wire_bytes)} sent (ring estimate).
      </p>
      <SourceLine source={reason.source} />
      {folded.length > 0 && (
        <section>
          <h3>{countOf(reason.modules.length, "module")}</h3>
          <p class="op-modules">
            {folded.slice(0, MAX_MODULES).map(({ module, count }) => (
              <span key={module}>
                <ModuleLink module={module} />
                {count > 1 && <span class="chip">×{formatNumber(count)}</span>}
              </span>
            ))}
            {more > 0 && <span class="dim">and {countOf(more, "kind")} more</span>}
          </p>
        </section>
      )}
    </div>
  );
}
