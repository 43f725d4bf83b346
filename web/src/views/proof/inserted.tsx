/** Collectives that were inserted into a parallel program, and ops that could not run sharded. */
import { useCallback, useMemo } from "preact/hooks";
import type { FallbackRow, InsertedRow } from "../../page";
import { Badge } from "../../parts/badge";
import { CollectiveName } from "../../parts/collective_name";
import { FacetLink } from "../../parts/facet_link";
import { ModuleLink } from "../../parts/module_link";
import { SourceLine } from "../../parts/source_line";
import { type Column, Table } from "../../parts/table";
import { Unfollowed } from "../../parts/unfollowed";
import { formatBytes, formatCount, formatNumber } from "../../parts/units";
import { moduleName } from "../../store/modules";
import { route } from "../../store/route";
import { formatLocation } from "../../store/selection";
import { FOLLOWED, listFallbacks, listInserted } from "./selected_rows";

interface InsertedProps {
  readonly rows: readonly InsertedRow[];
  readonly label: string;
}

export function Inserted({ rows, label }: InsertedProps) {
  const entries = useMemo(() => rows.map(listInserted), [rows, route.value.params]);
  const columns = useMemo(() => makeColumns(rows, entries), [rows, entries]);
  const isShown = useCallback((row: number) => entries[row]!.length > 0, [entries]);
  const modulesOf = useCallback((row: number) => rows[row]!.modules, [rows]);
  return (
    <section class="proof-table">
      <h3 class="detail-head">Inserted collectives of a rank; identical layers share a row</h3>
      <Unfollowed what="They" follows={FOLLOWED.inserted} />
      <Table
        label={label}
        numRows={rows.length}
        columns={columns}
        isShown={isShown}
        modules={modulesOf}
        detail={(row) => <InsertedDetail row={rows[row]!} />}
        empty="No collective was inserted."
        height="20rem"
      />
    </section>
  );
}

function makeColumns(
  rows: readonly InsertedRow[],
  entries: readonly (readonly number[])[],
): Column[] {
  const at = (row: number): InsertedRow => rows[row]!;
  const firstOf = (row: number): number => entries[row]![0] ?? 0;
  const moduleOf = (row: number): number => at(row).modules[firstOf(row)] ?? -1;
  const sourceOf = (row: number): number => at(row).sources[firstOf(row)] ?? -1;
  const count = (row: number): number => entries[row]!.length;
  return [
    {
      id: "what",
      title: "Collective",
      width: 10.5,
      grow: 1,
      isText: true,
      value: (row) => `${at(row).kind}[${at(row).axis}]`,
      cell: (row) => (
        <span class="clip">
          <CollectiveName {...at(row)} />
        </span>
      ),
    },
    {
      id: "phase",
      title: "Phase",
      width: 6.5,
      isText: true,
      value: (row) => at(row).phase,
      cell: (row) => (
        <FacetLink facet="phase" value={at(row).phase}>
          {at(row).phase}
        </FacetLink>
      ),
    },
    {
      id: "count",
      title: "Count",
      width: 5,
      align: "end",
      value: count,
      cell: (row) => formatCount(count(row)),
    },
    {
      id: "input",
      title: "Input",
      hint: "bytes of a rank's input, of all of them",
      width: 6.5,
      align: "end",
      value: (row) => count(row) * at(row).size_bytes,
      cell: (row) => formatBytes(count(row) * at(row).size_bytes),
    },
    {
      id: "module",
      title: "Module",
      width: 11,
      grow: 2,
      isText: true,
      value: (row) => moduleName(moduleOf(row)),
      cell: (row) => (
        <span class="clip-pair">
          <span class="clip">
            <ModuleLink module={moduleOf(row)} />
          </span>
          {count(row) > 1 && (
            <span class="dim" title={`and ${formatNumber(count(row) - 1)} more`}>
              +{formatNumber(count(row) - 1)}
            </span>
          )}
        </span>
      ),
    },
    {
      id: "cause",
      title: "Cause",
      width: 14,
      grow: 4,
      isText: true,
      value: (row) => at(row).cause,
    },
    {
      id: "line",
      title: "Line",
      width: 8,
      grow: 1,
      isText: true,
      isNeverCut: true,
      value: (row) => formatLocation(sourceOf(row)),
      cell: (row) => <SourceLine source={sourceOf(row)} isShort />,
    },
  ];
}

function InsertedDetail({ row }: { row: InsertedRow }) {
  const sources = [...new Set(row.sources)].filter((source) => source >= 0);
  return (
    <div class="op-detail">
      <p class="wrap">{row.cause}</p>
      <p class="op-modules">
        {[...new Set(row.modules)].map((module) => (
          <ModuleLink key={module} module={module} />
        ))}
      </p>
      {sources.map((source) => (
        <SourceLine key={source} source={source} />
      ))}
    </div>
  );
}

export function Fallbacks({ rows }: { rows: readonly FallbackRow[] }) {
  const shown = rows
    .map((row) => ({ row, entries: listFallbacks(row) }))
    .filter(({ entries }) => entries.length);
  return (
    <>
      <Unfollowed what="Fallbacks" follows={FOLLOWED.fallbacks} />
      {!shown.length && <p class="proof-none">No fallback is in what is selected.</p>}
      <ul class="breaks">
        {shown.map(({ row, entries }, i) => (
          <Fallback key={i} row={row} entries={entries} />
        ))}
      </ul>
    </>
  );
}

function Fallback({ row, entries }: { row: FallbackRow; entries: readonly number[] }) {
  const first = entries[0]!;
  const numBytes = entries.reduce((sum, at) => sum + row.sizes_bytes[at]!, 0);
  return (
    <li class="break">
      <div class="break-head">
        <Badge word={row.kind} tone="warn" />
        <code>{row.op}</code>
        {entries.length > 1 && <span class="chip">×{formatNumber(entries.length)}</span>}
        <span>
          in <ModuleLink module={row.modules[first]!} /> along{" "}
          <FacetLink facet="axis" value={row.axis} isInline>
            {row.axis}
          </FacetLink>
          , {formatBytes(numBytes)} moved
        </span>
      </div>
      <p class="mono wrap">{row.placements}</p>
      <SourceLine source={row.sources[first]!} />
      <p class="remedy">{row.remedy}</p>
    </li>
  );
}
