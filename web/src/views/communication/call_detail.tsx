/** One collective: its tooltip and its details. */
import type { Calls, Communication } from "../../page";
import { Badge } from "../../parts/badge";
import { ModuleLink } from "../../parts/module_link";
import { SourceLine } from "../../parts/source_line";
import { formatBytes, formatDuration, formatNumber } from "../../parts/units";
import { moduleName } from "../../store/modules";
import { page } from "../../store/page";
import { nameFacet } from "../../store/selection";
import { formatCoordinate } from "./mesh";
import { nameAxis } from "./totals";

function getCommunication(): Communication {
  return page.value.communication!;
}

/** `all_gather[tp]`. */
export function formatCallName(row: number, calls: Calls = getCommunication().calls): string {
  const communication = getCommunication();
  const { kind, axis } = calls;
  return `${communication.kinds[kind[row]!]}[${nameAxis(communication, axis[row]!)}]`;
}

export function describeCall(row: number): string {
  const { calls } = getCommunication();
  return `${formatCallName(row)} of rank ${calls.rank[row]}, ${formatBytes(calls.wire_bytes[row]!)} sent, ${moduleName(calls.owner[row]!)}`;
}

export function CallTip({ row }: { row: number }) {
  const { calls, phases, causes } = getCommunication();
  const start = calls.start_ns[row];
  return (
    <>
      <div class="tooltip-title">{formatCallName(row)}</div>
      <div class="dim mono">{moduleName(calls.owner[row]!)}</div>
      <dl>
        <dt>rank</dt>
        <dd>
          {calls.rank[row]}, number {formatNumber(calls.order[row]!)}
        </dd>
        <dt>phase</dt>
        <dd>{phases[calls.phase[row]!]}</dd>
        <dt>sent</dt>
        <dd>{formatBytes(calls.wire_bytes[row]!)}</dd>
        {start !== undefined && (
          <>
            <dt>after</dt>
            <dd>{formatDuration(start)}</dd>
          </>
        )}
      </dl>
      <div>{causes[calls.cause[row]!]}</div>
    </>
  );
}

export function SpanTip({ row }: { row: number }) {
  const { spans, clock } = getCommunication();
  return (
    <>
      <div class="tooltip-title">{spans.names[spans.name[row]!]}</div>
      <dl>
        <dt>took</dt>
        <dd>{formatDuration(spans.duration_ns[row]!)}</dd>
        <dt>after</dt>
        <dd>{formatDuration(spans.start_ns[row]!)}</dd>
        <dt>rank, clock</dt>
        <dd>
          {spans.rank[row]}, {spans.names[spans.device[row]!]}
        </dd>
      </dl>
      {clock && <div class="dim">{clock}</div>}
    </>
  );
}

/** `calls` are those that `row` is a row of, by default the page's own. */
export function CallDetail({
  row,
  calls = getCommunication().calls,
}: {
  row: number;
  calls?: Calls;
}) {
  const communication = getCommunication();
  const { causes, groups, phases, dtypes } = communication;
  const { mesh, world_size } = page.value.run;
  const group = groups[calls.group[row]!];
  const coordinate = formatCoordinate(calls.rank[row]!, mesh, world_size);
  const [owner, trigger] = [calls.owner[row]!, calls.trigger[row]!];
  const start = calls.start_ns[row];
  return (
    <div class="op-detail">
      <p class="cause-head">
        <b class="mono">{formatCallName(row, calls)}</b>
        {communication.implicit_causes.includes(calls.cause[row]!) && (
          <Badge word="implicit" tone="warn" />
        )}
        <span class="wrap">{causes[calls.cause[row]!]}</span>
      </p>
      <SourceLine source={calls.source[row]!} />
      <dl class="detail-list">
        <div>
          <dt>belongs to</dt>
          <dd>
            <ModuleLink module={owner} />
          </dd>
        </div>
        {trigger !== owner && (
          <div>
            <dt>issued in</dt>
            <dd>
              <ModuleLink module={trigger} />
            </dd>
          </div>
        )}
        <div>
          <dt>rank</dt>
          <dd>
            {calls.rank[row]}
            {coordinate && <span class="dim"> ({coordinate})</span>}, its number{" "}
            {formatNumber(calls.order[row]!)}, in {phases[calls.phase[row]!]}
            {calls.step[row]! > 0 && ` of ${nameFacet("step")} ${calls.step[row]}`}
            {start !== undefined && `, ${formatDuration(start)} after the recording began`}
          </dd>
        </div>
        <div>
          <dt>bytes</dt>
          <dd>
            {formatBytes(calls.input_bytes[row]!)} input, {formatBytes(calls.output_bytes[row]!)}{" "}
            output, {formatBytes(calls.wire_bytes[row]!)} sent (ring estimate)
            <span class="dim"> of {dtypes[calls.dtype[row]!]}</span>
          </dd>
        </div>
        {group && (
          <div>
            <dt>group</dt>
            <dd class="wrap">
              {group.name}: {formatNumber(group.num_ranks)} ranks,{" "}
              <span class="mono">{group.ranks}</span>
              {group.backend && <span class="dim"> by {group.backend}</span>}
            </dd>
          </div>
        )}
      </dl>
    </div>
  );
}
