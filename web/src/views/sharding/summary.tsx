/** Bytes of all parameters, of those on one rank, and of those that are replicated. */
import type { ShardingTable } from "../../page";
import { Empty } from "../../parts/empty";
import { Panel } from "../../parts/panel";
import { formatBytes, formatShare } from "../../parts/units";
import { page } from "../../store/page";

export function Summary({ table }: { table: ShardingTable }) {
  const { global_bytes: whole, local_bytes: local, replicated_bytes: shared } = table;
  if (whole === null || local === null) {
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
    >
      <div class="held">
        <Line label="all parameters" text={formatBytes(whole)}>
          <span class="held-part held-whole" style={{ flexGrow: 1 }} />
        </Line>
        <Line
          label="on one rank"
          text={`${formatBytes(local)}, ${formatShare(local, whole)} of it`}
        >
          <span class="held-part held-local" style={{ flexGrow: local }} />
          <span class="held-rest" style={{ flexGrow: Math.max(whole - local, 0) }} />
        </Line>
        {page.value.run.world_size > 1 && local > 0 && shared !== null && (
          <Line
            label="replicated"
            text={`${formatBytes(shared)}, ${formatShare(shared, local)} of that`}
          >
            {shared > 0 && <span class="held-part held-shared" style={{ flexGrow: shared }} />}
            <span class="held-rest" style={{ flexGrow: Math.max(local - shared, 0) }} />
          </Line>
        )}
      </div>
    </Panel>
  );
}

interface LineProps {
  readonly label: string;
  readonly text: string;
  readonly children: preact.ComponentChildren;
}

function Line({ label, text, children }: LineProps) {
  return (
    <div class="held-line">
      <span class="held-label">{label}</span>
      <span class="held-bar">{children}</span>
      <span class="held-text">{text}</span>
    </div>
  );
}
