/** Table of causes of collectives, the most expensive first. */
import { useCallback, useMemo } from "preact/hooks";
import type { Communication } from "../../page";
import { Badge } from "../../parts/badge";
import { Bar } from "../../parts/bar";
import { CollectiveName } from "../../parts/collective_name";
import { FacetLink } from "../../parts/facet_link";
import { Highlight } from "../../parts/highlight";
import { ModuleLink } from "../../parts/module_link";
import { isNarrow } from "../../parts/narrow";
import { Panel } from "../../parts/panel";
import { SourceLine } from "../../parts/source_line";
import { type Column, Table } from "../../parts/table";
import { formatBytes, formatCount, formatNumber, pluralize } from "../../parts/units";
import { moduleName, representatives } from "../../store/modules";
import { formatLocation, selectedFacets } from "../../store/selection";
import { type CauseRow, selectedCauses, shortenCause } from "./cause_rows";
import { nameRank } from "./totals";

const MAX_MODULES = 24;

interface Props {
  readonly communication: Communication;
}

export function Causes({ communication }: Props) {
  const rows = selectedCauses.value;
  const columns = useMemo(() => makeColumns(communication, rows), [rows]);
  const isShown = useCallback((row: number) => rows[row]!.count > 0, [rows]);
  const modulesOf = useCallback((row: number) => rows[row]!.modules, [rows]);
  return (
    <Panel title="Causes" note={describe(communication)}>
      <Table
        label="causes"
        numRows={rows.length}
        columns={columns}
        sort={{ column: "wire", isDescending: true }}
        isShown={isShown}
        modules={modulesOf}
        detail={(row) => <CauseDetail communication={communication} cause={rows[row]!} />}
        empty="No collective was recorded, so none has a cause."
        height="24rem"
      />
    </Panel>
  );
}

function describe({ scope }: Communication): string {
  const facts = [nameRank(), selectedFacets.value.length > 0 && "what is selected", scope];
  return `The most expensive first; figures: ${facts.filter(Boolean).join(", ")}. Click a cause to select it, a row for its line and modules.`;
}

function makeColumns({ causes }: Communication, rows: readonly CauseRow[]): Column[] {
  const at = (row: number): CauseRow => rows[row]!;
  const max = Math.max(0, ...rows.map(({ wire_bytes }) => wire_bytes));
  return [
    {
      id: "cause",
      title: "Cause",
      width: 22,
      grow: 1,
      isText: true,
      isNeverCut: true,
      value: (row) => causes[at(row).cause]!,
      texts: rows.map(({ cause }) => shortenCause(causes[cause]!)),
      cell: (row) => (
        <span class="cause">
          {at(row).isImplicit && <Badge word="implicit" tone="warn" />}
          <FacetLink facet="cause" value={causes[at(row).cause]!}>
            <Highlight text={shortenCause(nameBesideBadge(causes[at(row).cause]!))} />
          </FacetLink>
        </span>
      ),
    },
    {
      id: "what",
      title: "What",
      width: 11,
      isText: true,
      value: (row) => at(row).what,
      cell: (row) => (
        <span class="clip">
          <CollectiveName {...at(row)} />
        </span>
      ),
    },
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
        <Bar value={at(row).wire_bytes} max={max} text={formatBytes(at(row).wire_bytes)} />
      ),
    },
    {
      id: "line",
      title: "Line",
      width: 10,
      grow: 1,
      isText: true,
      isNeverCut: true,
      value: (row) => formatLocation(at(row).source),
      cell: (row) => <SourceLine source={at(row).source} isShort />,
    },
    {
      id: "modules",
      title: "Modules",
      width: 13,
      grow: 1,
      isText: true,
      value: (row) => at(row).modules.map(moduleName).join("\n"),
      texts: rows.map(({ modules }) => (modules.length ? moduleName(modules[0]!) : "")),
      cell: (row) => <FirstModule modules={at(row).modules} />,
    },
  ];
}

/** The cause without the word that its badge says; a narrow screen has no badge. */
function nameBesideBadge(words: string): string {
  return isNarrow.value ? words : words.replace(/^implicit /, "");
}

function FirstModule({ modules }: { modules: readonly number[] }) {
  if (!modules.length) return null;
  return (
    <span class="clip-pair">
      <span class="clip">
        <ModuleLink module={modules[0]!} />
      </span>
      {modules.length > 1 && (
        <span class="dim" title={`and ${pluralize(modules.length - 1, "more module")}`}>
          +{formatNumber(modules.length - 1)}
        </span>
      )}
    </span>
  );
}

interface FoldedModules {
  readonly module: number; // the first of them
  readonly count: number;
}

/** Groups identical modules: the first of each group, and their number. */
export function foldModules(
  modules: readonly number[],
  firsts: ArrayLike<number>,
): FoldedModules[] {
  const countsByFirst = new Map<number, { module: number; count: number }>();
  for (const module of modules) {
    const first = module < 0 ? -1 : firsts[module]!;
    const entry = countsByFirst.get(first);
    if (!entry) countsByFirst.set(first, { module, count: 1 });
    else {
      entry.count++;
      entry.module = Math.min(entry.module, module);
    }
  }
  return [...countsByFirst.values()];
}

interface DetailProps extends Props {
  readonly cause: CauseRow;
}

function CauseDetail({ communication, cause }: DetailProps) {
  const folded = foldModules(cause.modules, representatives.value);
  const more = folded.length - MAX_MODULES;
  return (
    <div class="op-detail">
      <p class="cause-head">
        {cause.isImplicit && <Badge word="implicit" tone="warn" />}
        <b class="wrap">{communication.causes[cause.cause]}</b>
      </p>
      {cause.isImplicit && (
        <p>No plan and no call asked for it: DTensor inserted it so that an op could run.</p>
      )}
      <p>
        <span class="mono">{cause.what}</span>, {formatNumber(cause.count)} times on a rank,{" "}
        {formatBytes(cause.wire_bytes)} sent (ring estimate).
      </p>
      <SourceLine source={cause.source} />
      {folded.length > 0 && (
        <section>
          <h3>{pluralize(cause.modules.length, "module")}</h3>
          <p class="op-modules">
            {folded.slice(0, MAX_MODULES).map(({ module, count }) => (
              <span key={module}>
                <ModuleLink module={module} />
                {count > 1 && <span class="chip">×{formatNumber(count)}</span>}
              </span>
            ))}
            {more > 0 && <span class="dim">and {pluralize(more, "kind")} more</span>}
          </p>
        </section>
      )}
    </div>
  );
}
