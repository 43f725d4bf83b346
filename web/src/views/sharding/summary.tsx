/** Bytes of all parameters, of those on one rank, and of replicated ones. */
import type { ShardingTable } from "../../page";
import { Empty } from "../../parts/empty_message";
import { Panel } from "../../parts/panel";
import { formatBytes, formatShare } from "../../parts/units";
import { page } from "../../store/page";
import { selectedFacets } from "../../store/selection";
import { sumLocalBytes } from "./parameter_filters";
import { listFollowed, makeParameterFilter } from "./selected_parameters";

export function Summary({ table }: { table: ShardingTable }) {
  const {
    global_bytes: globalBytes,
    local_bytes: localBytes,
    replicated_bytes: replicatedBytes,
  } = table;
  if (globalBytes === null || localBytes === null) {
    return (
      <Panel title="What a rank holds">
        <Empty>Sizes of parameters were not recorded.</Empty>
      </Panel>
    );
  }
  return (
    <Panel
      title="What a rank holds"
      note="Parameters, tied ones once, without buffers; of the rank that holds most."
      follows={listFollowed(table.parameters)}
    >
      <div class="rank-bytes">
        <SummaryLine label="all parameters" text={formatBytes(globalBytes)}>
          <span class="rank-bytes-part rank-bytes-global" style={{ flexGrow: 1 }} />
        </SummaryLine>
        <SummaryLine
          label="on one rank"
          text={`${formatBytes(localBytes)}, ${formatShare(localBytes, globalBytes)} of it`}
        >
          <span class="rank-bytes-part rank-bytes-local" style={{ flexGrow: localBytes }} />
          <span
            class="rank-bytes-rest"
            style={{ flexGrow: Math.max(globalBytes - localBytes, 0) }}
          />
        </SummaryLine>
        {page.value.run.world_size > 1 && localBytes > 0 && replicatedBytes !== null && (
          <SummaryLine
            label="replicated"
            text={`${formatBytes(replicatedBytes)}, ${formatShare(replicatedBytes, localBytes)} of that`}
          >
            {replicatedBytes > 0 && (
              <span
                class="rank-bytes-part rank-bytes-replicated"
                style={{ flexGrow: replicatedBytes }}
              />
            )}
            <span
              class="rank-bytes-rest"
              style={{ flexGrow: Math.max(localBytes - replicatedBytes, 0) }}
            />
          </SummaryLine>
        )}
        <SelectedLine table={table} localBytes={localBytes} />
      </div>
    </Panel>
  );
}

/** The part of a rank's bytes that is selected, or what the selected rank holds. */
function SelectedLine({ table, localBytes }: { table: ShardingTable; localBytes: number }) {
  const followed = listFollowed(table.parameters);
  if (!selectedFacets.value.some((facet) => followed.includes(facet))) return null;
  const numBytes = sumLocalBytes(table.parameters, makeParameterFilter(table.parameters));
  if (numBytes === null) return null;
  return (
    <SummaryLine
      label="selected"
      text={`${formatBytes(numBytes)}, ${formatShare(numBytes, localBytes)} of what is on one rank`}
    >
      <span class="rank-bytes-part rank-bytes-local" style={{ flexGrow: numBytes }} />
      <span class="rank-bytes-rest" style={{ flexGrow: Math.max(localBytes - numBytes, 0) }} />
    </SummaryLine>
  );
}

interface LineProps {
  readonly label: string;
  readonly text: string;
  readonly children: preact.ComponentChildren;
}

function SummaryLine({ label, text, children }: LineProps) {
  return (
    <div class="rank-bytes-line">
      <span class="rank-bytes-label">{label}</span>
      <span class="rank-bytes-bar">{children}</span>
      <span class="rank-bytes-text">{text}</span>
    </div>
  );
}
