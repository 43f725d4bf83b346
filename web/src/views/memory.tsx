/** Memory over a step: the curve, and what is in use at any instant. */
import "./memory.css";
import { useCallback, useMemo } from "preact/hooks";
import type { MemoryCurve } from "../page";
import { Bar } from "../parts/bar";
import { Choices } from "../parts/choices";
import { seriesColor } from "../parts/colors";
import { ModuleLink } from "../parts/module_link";
import { Panel } from "../parts/panel";
import { type Column, Table } from "../parts/table";
import { Unfollowed } from "../parts/unfollowed";
import { formatBytes, formatShare } from "../parts/units";
import { hasModuleSelection, isInSelection, moduleName, selectedName } from "../store/modules";
import { page } from "../store/page";
import { firstRank } from "../store/ranks";
import { route } from "../store/route";
import { isRankSelected, select, selection } from "../store/selection";
import { AreaChart } from "./memory/area_chart";
import { GROUPINGS, InUse } from "./memory/in_use";
import { readInstants } from "./memory/instants";
import { listCurveFacets, selectCurve, shownCurve } from "./memory/selected_curve";
import { type KindSum, sumKinds } from "./memory/stacked_series";
import type { View } from "./view";

const MAX_CHOICES = 8; // ranks to choose from, beside the selected one

function Memory() {
  const curves = page.value.memory;
  const curve = shownCurve.value!;
  const curveIndex = curves.indexOf(curve);
  const instants = readInstants(curve);
  const selected = useMemo(() => selectCurve(curve), [curve, route.value.params]);
  return (
    <>
      <Panel
        title="Memory over the step"
        note={describe(curve, selected)}
        follows={listCurveFacets(curve)}
        controls={
          curves.length > 1 && (
            <Choices
              label="ranks"
              choices={curves
                .map(({ ranks }, i) => ({ id: String(i), title: `rank ${ranks}` }))
                .filter((_, i) => i < MAX_CHOICES || i === curveIndex)}
              value={String(curveIndex)}
              onChange={(id) => select("rank", firstRank(curves[Number(id)]!.ranks))}
            />
          )
        }
      >
        <AreaChart curve={selected ?? curve} instants={instants} isPart={selected !== null} />
        <Figures curve={curve} />
      </Panel>
      {curve.allocations ? (
        <InUse key={curveIndex} curve={curve} table={curve.allocations} instants={instants} />
      ) : (
        <div class="memory-below">
          <PeakByCategory curve={curve} />
          <PeakByModule curve={curve} />
        </div>
      )}
    </>
  );
}

function describe(curve: MemoryCurve, selected: MemoryCurve | null): string {
  const { rank } = selection.value;
  const instead = isRankSelected(curve.ranks) ? "" : `Rank ${rank} has no memory profile. `;
  const where = curve.peak_module < 0 ? "" : `, while ${moduleName(curve.peak_module)} ran`;
  const peak = `Peak: ${formatBytes(curve.peak_bytes)}, in ${curve.peak_phase}${where}`;
  const keys = curve.allocations
    ? "Click an instant to see what is in use, drag or Shift-click to see what changed between two."
    : "";
  const note = curve.allocations?.note ? ` (${curve.allocations.note})` : "";
  const part = selected
    ? ` Drawn: what is selected, at most ${formatBytes(selected.peak_bytes)}${note}.`
    : "";
  return `${instead}${peak}; ${curve.caveat}.${part} From left to right: order of allocations, not time. ${keys}`;
}

function Figures({ curve }: { curve: MemoryCurve }) {
  const rows: readonly [string, number | null, string][] = [
    ["peak of a step", curve.peak_bytes, "as torch.cuda.max_memory_allocated counts"],
    ["of the first step", curve.first_peak_bytes, "which creates the optimizer's state"],
    ["reserved", curve.reserved_bytes, "the most that the allocator has taken from the device"],
    ["needed on a device", curve.needed_bytes, "the peak and the CUDA context"],
    ["the device has", curve.device_bytes, curve.room],
  ];
  return (
    <>
      <Unfollowed what="These figures" follows={["rank"]} />
      <dl class="memory-figures">
        {rows.map(
          ([label, value, hint]) =>
            value !== null && (
              <div key={label}>
                <dt>{label}</dt>
                <dd>
                  {formatBytes(value)} <span class="dim">{hint}</span>
                </dd>
              </div>
            ),
        )}
      </dl>
    </>
  );
}

function PeakByCategory({ curve }: { curve: MemoryCurve }) {
  const sums = hasModuleSelection.value ? sumSelectedKinds(curve) : sumKinds(curve);
  return (
    <Panel
      title="At the peak, by category"
      follows={["module", "rank"]}
      note={hasModuleSelection.value && `Of ${selectedName.value}.`}
    >
      <ul class="memory-kinds">
        {sums.map(({ kind, numBytes }) => (
          <li key={kind}>
            <span class="swatch" style={{ background: seriesColor(kind) }} />
            <span class="memory-kind">{curve.kinds[kind]!.replaceAll("_", " ")}</span>
            <Bar
              value={numBytes}
              max={sums[0]?.numBytes ?? 0}
              text={formatBytes(numBytes)}
              color={seriesColor(kind)}
            />
            <span class="memory-share">{formatShare(numBytes, curve.peak_bytes)}</span>
          </li>
        ))}
      </ul>
    </Panel>
  );
}

/** Bytes of the selected modules at the peak, by kind. */
function sumSelectedKinds(curve: MemoryCurve): KindSum[] {
  const sums = new Map<number, number>();
  for (const { module, kind, num_bytes } of curve.at_peak) {
    if (isInSelection(module)) sums.set(kind, (sums.get(kind) ?? 0) + num_bytes);
  }
  return [...sums]
    .map(([kind, numBytes]) => ({ kind, numBytes }))
    .sort((a, b) => b.numBytes - a.numBytes);
}

function PeakByModule({ curve }: { curve: MemoryCurve }) {
  const columns = useMemo(() => makeColumns(curve), [curve]);
  const rows = curve.at_peak;
  const moduleOf = useCallback((row: number) => rows[row]!.module, [rows]);
  const sum = rows.reduce((all, row) => (isInSelection(row.module) ? all + row.num_bytes : all), 0);
  const note = !hasModuleSelection.value
    ? "Modules that own the memory."
    : `${selectedName.value} owns ${formatBytes(sum)}, ${formatShare(sum, curve.peak_bytes)} of the peak.`;
  return (
    <Panel
      title="At the peak, by module"
      follows={["module", "rank"]}
      note={`${note} Other instants were not recorded: record again with this version.`}
    >
      <Table
        label="memory of modules at the peak"
        numRows={rows.length}
        columns={columns}
        sort={{ column: "bytes", isDescending: true }}
        modules={moduleOf}
        empty="No module owns any memory at the peak."
        height="28rem"
      />
    </Panel>
  );
}

function makeColumns(curve: MemoryCurve): Column[] {
  const rows = curve.at_peak;
  const max = Math.max(0, ...rows.map((row) => row.num_bytes));
  return [
    {
      id: "module",
      title: "Module",
      width: 12,
      grow: 3,
      value: (row) => (rows[row]!.module < 0 ? "no module" : moduleName(rows[row]!.module)),
      cell: (row) => (
        <span class="clip">
          <ModuleLink module={rows[row]!.module} text={linkText(rows[row]!.module)} />
        </span>
      ),
    },
    {
      id: "kind",
      title: "Category",
      width: 10.5,
      grow: 1,
      value: (row) => curve.kinds[rows[row]!.kind]!.replaceAll("_", " "),
      cell: (row) => (
        <span class="clip">
          <span class="swatch" style={{ background: seriesColor(rows[row]!.kind) }} />
          {curve.kinds[rows[row]!.kind]!.replaceAll("_", " ")}
        </span>
      ),
    },
    {
      id: "bytes",
      title: "Bytes",
      width: 11,
      grow: 1,
      align: "end",
      value: (row) => rows[row]!.num_bytes,
      cell: (row) => (
        <Bar
          value={rows[row]!.num_bytes}
          max={max}
          text={formatBytes(rows[row]!.num_bytes)}
          color={seriesColor(rows[row]!.kind)}
        />
      ),
    },
  ];
}

function linkText(module: number): string | undefined {
  return module < 0 ? "no module" : undefined;
}

export const view: View = {
  id: "memory",
  title: "Memory",
  hasData: (page) => page.memory.length > 0,
  empty: "Memory was not recorded.",
  command: "shardscope memory TARGET -o recording.json",
  params: ({ memory }) => ({
    by: GROUPINGS.map(({ id }) => id),
    category: [...new Set(memory.flatMap(({ kinds }) => kinds))],
    at: /^-?\d+$/,
    from: /^-?\d+$/,
  }),
  Component: Memory,
};
