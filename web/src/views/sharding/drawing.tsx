/** How a tensor lies on its mesh: its picture cut into pieces, and the same in words. */
import { useRef } from "preact/hooks";
import type { Drawing, Piece } from "../../page";
import { colorOf } from "../../parts/colors";
import { useSize } from "../../parts/size";
import { tip } from "../../parts/tooltip";
import { countOf } from "../../parts/units";
import { page } from "../../store/page";
import { fitPicture, strengthOf } from "./picture";

const MARGIN = { left: 26, top: 24 };
const MAX_HEIGHT = 230;
const LETTER = 7.4; // pixels of a letter of a label

export function Placed({ drawing }: { drawing: Drawing }) {
  return (
    <div class="placed">
      <Picture drawing={drawing} />
      <div class="placed-told">
        <p class="placed-words">{drawing.words || "whole on every rank"}</p>
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
  const most = { width: Math.max(room - MARGIN.left - 2, 60), height: MAX_HEIGHT };
  const { width, height } = fitPicture(horizontal, vertical, most);
  return (
    <div ref={box} class="picture">
      {room > 0 && (
        <svg
          width={width + MARGIN.left + 2}
          height={height + MARGIN.top + 2}
          role="img"
          aria-label={`${countOf(pieces.length, "piece")}: ${drawing.words}`}
        >
          <text class="side" x={MARGIN.left + width / 2} y={MARGIN.top - 8} text-anchor="middle">
            {horizontal}
          </text>
          {vertical && (
            <text
              class="side"
              transform={`translate(${MARGIN.left - 9} ${MARGIN.top + height / 2}) rotate(-90)`}
              text-anchor="middle"
            >
              {vertical}
            </text>
          )}
          <g transform={`translate(${MARGIN.left} ${MARGIN.top})`}>
            <rect class="outline" width={width} height={height} />
            {pieces.map((piece, i) => (
              <PieceBox key={i} piece={piece} width={width} height={height} />
            ))}
            {!pieces.length && (
              <text class="side" x={width / 2} y={height / 2} text-anchor="middle" dy="0.35em">
                {drawing.axes.length ? "in too many pieces to draw" : "not cut"}
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
}

function PieceBox({ piece, width, height }: PieceBoxProps) {
  const box = {
    x: piece.left * width,
    y: piece.top * height,
    width: piece.width * width,
    height: piece.height * height,
  };
  const label = piece.ranks;
  const isRoomy = box.height >= 15 && box.width >= LETTER * label.length + 6;
  return (
    <g class="piece" {...tip(() => <PieceTip piece={piece} />)}>
      <rect {...box} fill={colorOf(piece.color)} fill-opacity={strengthOf(piece.color)} />
      {isRoomy && (
        <text x={box.x + box.width / 2} y={box.y + box.height / 2} dy="0.35em" text-anchor="middle">
          {label}
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
  if (!/^\d/.test(ranks)) return ranks === "all" ? "all ranks" : ranks;
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
