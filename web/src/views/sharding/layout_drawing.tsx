/** The layout of a tensor on its mesh: a drawing of its shards, and a description. */
import { useRef } from "preact/hooks";
import type { Drawing, ShardRectangle } from "../../page";
import { remPixels } from "../../parts/canvas";
import { seriesColor } from "../../parts/colors";
import { tip } from "../../parts/tooltip";
import { pluralize } from "../../parts/units";
import { useSize } from "../../parts/use_size";
import { page } from "../../store/page";
import { fitPicture, shardOpacity } from "./drawing_size";

// In rem
const MARGIN = 1.8;
const MAX_HEIGHT = 18.5;
const LETTER = 0.52; // width of a letter in a label
const LINE = 0.95;

export function LayoutDrawing({ drawing }: { drawing: Drawing }) {
  return (
    <div class="layout">
      <Picture drawing={drawing} />
      <div class="layout-text">
        <p class="layout-description">{drawing.description || "replicated on every rank"}</p>
        {drawing.note && <p class="dim">{drawing.note}</p>}
        <MeshAxes drawing={drawing} />
        {drawing.shards.length > 1 && <ShardList shards={drawing.shards} />}
      </div>
    </div>
  );
}

function Picture({ drawing }: { drawing: Drawing }) {
  const box = useRef<HTMLDivElement>(null);
  const { width: availableWidth } = useSize(box);
  const { horizontal, vertical, shards } = drawing;
  const rem = remPixels();
  const margin = MARGIN * rem;
  const max = { width: Math.max(availableWidth - margin - 2, 4 * rem), height: MAX_HEIGHT * rem };
  const { width, height } = fitPicture(horizontal, vertical, max);
  return (
    <div ref={box} class="picture">
      {availableWidth > 0 && (
        <svg
          width={width + margin + 2}
          height={height + margin + 2}
          role="img"
          aria-label={`${pluralize(shards.length, "shard")}: ${drawing.description}`}
        >
          <text class="side" x={margin + width / 2} y={0.65 * margin} text-anchor="middle">
            {horizontal}
          </text>
          {vertical && (
            <text
              class="side"
              transform={`translate(${0.65 * margin} ${margin + height / 2}) rotate(-90)`}
              text-anchor="middle"
            >
              {vertical}
            </text>
          )}
          <g transform={`translate(${margin} ${margin})`}>
            <rect class="outline" width={width} height={height} />
            {shards.map((shard, i) => (
              <ShardBox key={i} shard={shard} width={width} height={height} rem={rem} />
            ))}
            {!shards.length && (
              <text class="side" x={width / 2} y={height / 2} text-anchor="middle" dy="0.35em">
                {drawing.axes.length ? "not drawn" : "not sharded"}
              </text>
            )}
          </g>
        </svg>
      )}
    </div>
  );
}

interface ShardBoxProps {
  readonly shard: ShardRectangle;
  readonly width: number; // of the full tensor, in pixels
  readonly height: number;
  readonly rem: number;
}

function ShardBox({ shard, width, height, rem }: ShardBoxProps) {
  const box = {
    x: shard.left * width,
    y: shard.top * height,
    width: shard.width * width,
    height: shard.height * height,
  };
  const hasRoomForLabel =
    box.height >= LINE * rem && box.width >= LETTER * rem * (shard.ranks.length + 1);
  return (
    <g class="shard" {...tip(() => <ShardTip shard={shard} />)}>
      <rect {...box} fill={seriesColor(shard.color)} fill-opacity={shardOpacity(shard.color)} />
      {hasRoomForLabel && (
        <text x={box.x + box.width / 2} y={box.y + box.height / 2} dy="0.35em" text-anchor="middle">
          {shard.ranks}
        </text>
      )}
    </g>
  );
}

function ShardTip({ shard }: { shard: ShardRectangle }) {
  return (
    <>
      <div class="tooltip-title">{shard.indices}</div>
      <div>{formatRanks(shard.ranks)}</div>
    </>
  );
}

/** `ranks 0-3`; if ranks are not known Python writes mesh coordinates, which are shown as they are. */
function formatRanks(ranks: string): string {
  if (!/^\d/.test(ranks)) return ranks === "all" ? "all ranks" : ranks || "no rank";
  return /^\d+$/.test(ranks) ? `rank ${ranks}` : `ranks ${ranks}`;
}

function MeshAxes({ drawing }: { drawing: Drawing }) {
  const { mesh } = page.value.run;
  if (!drawing.axes.length) return null;
  return (
    <ul class="layout-axes" aria-label="placements by mesh axis">
      {drawing.axes.map((axis, i) => {
        const size = mesh.find(({ name }) => name === axis)?.size;
        return (
          <li key={i}>
            <span class="mesh-name">{size === undefined ? axis : `${axis}=${size}`}</span>{" "}
            <span class="mono">{drawing.placements[i]}</span>
          </li>
        );
      })}
    </ul>
  );
}

function ShardList({ shards }: { shards: readonly ShardRectangle[] }) {
  return (
    <details class="shards">
      <summary>{pluralize(shards.length, "shard")} as a list</summary>
      <ul>
        {shards.map((shard, i) => (
          <li key={i}>
            <span
              class="swatch"
              style={{ background: seriesColor(shard.color), opacity: shardOpacity(shard.color) }}
            />
            <span class="mono">{shard.indices}</span>
            <span class="dim">{formatRanks(shard.ranks)}</span>
          </li>
        ))}
      </ul>
    </details>
  );
}
