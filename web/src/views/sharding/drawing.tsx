/** The layout of a tensor on its mesh: its picture in shards, and the same in words. */
import { useRef } from "preact/hooks";
import type { Drawing, Piece } from "../../page";
import { remPixels } from "../../parts/canvas";
import { colorOf } from "../../parts/colors";
import { useSize } from "../../parts/size";
import { tip } from "../../parts/tooltip";
import { countOf } from "../../parts/units";
import { page } from "../../store/page";
import { fitPicture, strengthOf } from "./picture";

// In rem
const MARGIN = 1.8;
const MAX_HEIGHT = 18.5;
const LETTER = 0.52; // of a label
const LINE = 0.95;

export function Placed({ drawing }: { drawing: Drawing }) {
  return (
    <div class="placed">
      <Picture drawing={drawing} />
      <div class="placed-told">
        <p class="placed-words">{drawing.words || "replicated on every rank"}</p>
        {drawing.note && <p class="dim">{drawing.note}</p>}
        <MeshAxes drawing={drawing} />
        {drawing.pieces.length > 1 && <PieceList pieces={drawing.pieces} />}
      </div>
    </div>
  );
}

function Picture({ drawing }: { drawing: Drawing }) {
  const box = useRef<HTMLDivElement>(null);
  const { width: room } = useSize(box);
  const { horizontal, vertical, pieces } = drawing;
  const rem = remPixels();
  const margin = MARGIN * rem;
  const most = { width: Math.max(room - margin - 2, 4 * rem), height: MAX_HEIGHT * rem };
  const { width, height } = fitPicture(horizontal, vertical, most);
  return (
    <div ref={box} class="picture">
      {room > 0 && (
        <svg
          width={width + margin + 2}
          height={height + margin + 2}
          role="img"
          aria-label={`${countOf(pieces.length, "piece")}: ${drawing.words}`}
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
            {pieces.map((piece, i) => (
              <PieceBox key={i} piece={piece} width={width} height={height} rem={rem} />
            ))}
            {!pieces.length && (
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

interface PieceBoxProps {
  readonly piece: Piece;
  readonly width: number; // of the whole tensor, in pixels
  readonly height: number;
  readonly rem: number;
}

function PieceBox({ piece, width, height, rem }: PieceBoxProps) {
  const box = {
    x: piece.left * width,
    y: piece.top * height,
    width: piece.width * width,
    height: piece.height * height,
  };
  const isRoomy = box.height >= LINE * rem && box.width >= LETTER * rem * (piece.ranks.length + 1);
  return (
    <g class="piece" {...tip(() => <PieceTip piece={piece} />)}>
      <rect {...box} fill={colorOf(piece.color)} fill-opacity={strengthOf(piece.color)} />
      {isRoomy && (
        <text x={box.x + box.width / 2} y={box.y + box.height / 2} dy="0.35em" text-anchor="middle">
          {piece.ranks}
        </text>
      )}
    </g>
  );
}

function PieceTip({ piece }: { piece: Piece }) {
  return (
    <>
      <div class="tooltip-title">{piece.indices}</div>
      <div>{nameHolders(piece.ranks)}</div>
    </>
  );
}

/** `ranks 0-3`; where nobody knows which ranks, Python gives coordinates, which speak for themselves. */
function nameHolders(ranks: string): string {
  if (!/^\d/.test(ranks)) return ranks === "all" ? "all ranks" : ranks || "no rank";
  return /^\d+$/.test(ranks) ? `rank ${ranks}` : `ranks ${ranks}`;
}

function MeshAxes({ drawing }: { drawing: Drawing }) {
  const { mesh } = page.value.run;
  if (!drawing.axes.length) return null;
  return (
    <ul class="placed-axes" aria-label="placements by mesh axis">
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

function PieceList({ pieces }: { pieces: readonly Piece[] }) {
  return (
    <details class="pieces">
      <summary>{countOf(pieces.length, "piece")} as a list</summary>
      <ul>
        {pieces.map((piece, i) => (
          <li key={i}>
            <span
              class="swatch"
              style={{ background: colorOf(piece.color), opacity: strengthOf(piece.color) }}
            />
            <span class="mono">{piece.indices}</span>
            <span class="dim">{nameHolders(piece.ranks)}</span>
          </li>
        ))}
      </ul>
    </details>
  );
}
