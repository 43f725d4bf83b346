/** Memory of the rank that needs most over a step, and whether it fits on the device. */
import type { MemoryCurve } from "../../page";
import { Badge } from "../../parts/badge";
import { Panel } from "../../parts/panel";
import { Term } from "../../parts/term";
import { formatBytes } from "../../parts/units";
import { hrefTo } from "../../store/route";
import { isRankSelected, selection } from "../../store/selection";
import { listCurveFacets, selectCurve, shownCurve } from "../memory/selected_curve";

const WIDTH = 600; // of the drawing, which is stretched
const HEIGHT = 90;
const HEADROOM = 1.1;

export function MemorySpark() {
  const curve = shownCurve.value;
  if (!curve) return null;
  const selected = selectCurve(curve);
  return (
    <Panel
      title="Memory of a step"
      follows={listCurveFacets(curve)}
      note={
        <>
          <Term word="peak" />{" "}
          {formatBytes(Math.max(curve.peak_bytes, curve.first_peak_bytes ?? 0))} in{" "}
          {curve.peak_phase}, rank {curve.ranks}
          {!isRankSelected(curve.ranks) && `; rank ${selection.value.rank} has no memory profile`}
          {selected && `; drawn: what is selected, at most ${formatBytes(selected.peak_bytes)}`}
        </>
      }
      controls={<Fit curve={curve} />}
    >
      <a class="spark" href={hrefTo("memory")} aria-label="show memory">
        <Drawing curve={selected ?? curve} />
      </a>
      <p class="spark-note">{curve.room || "The memory of the device was not given."}</p>
    </Panel>
  );
}

function Fit({ curve }: { curve: MemoryCurve }) {
  const { device_bytes: device, needed_bytes: needed } = curve;
  if (device === null || needed === null) return <Badge word="not judged" />;
  return needed > device ? (
    <Badge word="does not fit" tone="bad" />
  ) : (
    <Badge word="fits" tone="good" />
  );
}

function Drawing({ curve }: { curve: MemoryCurve }) {
  const totals = curve.order.map((_, at) =>
    curve.num_bytes.reduce((sum, column) => sum + column[at]!, 0),
  );
  const device = curve.device_bytes ?? 0;
  const isDeviceDrawn = device > 0 && device <= 2 * curve.peak_bytes;
  const high = Math.max(...totals, curve.peak_bytes, isDeviceDrawn ? device : 0, 1) * HEADROOM;
  const first = curve.order[0] ?? 0;
  const span = Math.max((curve.order.at(-1) ?? 1) - first, 1);
  const x = (at: number): number => ((curve.order[at]! - first) / span) * WIDTH;
  const y = (bytes: number): number => HEIGHT * (1 - bytes / high);
  const path = totals
    .map((bytes, at) => `${at ? `H${x(at).toFixed(1)}V` : "M0 "}${y(bytes).toFixed(1)}`)
    .join("");
  return (
    <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
      <path class="spark-area" d={`${path}H${WIDTH}V${HEIGHT}H0Z`} />
      <path class="spark-line" d={`${path}H${WIDTH}`} />
      {isDeviceDrawn && <path class="spark-device" d={`M0 ${y(device)}H${WIDTH}`} />}
    </svg>
  );
}
