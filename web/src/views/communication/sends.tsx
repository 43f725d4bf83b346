/** Who sends to whom: a row for each sender, a column for each receiver. */
import { useCallback, useMemo, useRef, useState } from "preact/hooks";
import type { Matrix } from "../../page";
import { Canvas, fontOf } from "../../parts/canvas";
import { resolveColor } from "../../parts/colors";
import { Panel } from "../../parts/panel";
import { useSize } from "../../parts/size";
import { hideTip, showTip } from "../../parts/tooltip";
import { formatBytes } from "../../parts/units";
import { page } from "../../store/page";
import { blockOf, labelStep, placeOfRank } from "./mesh";

const LEFT = 48;
const TOP = 28;
const MAX_CELL = 76;
const MAX_SIDE = 620;
const TEXT_CELL = 60; // from here on a cell has room for its figure
const HOT = 0.5;

interface Props {
  readonly matrix: Matrix | null;
  readonly note: string;
}

export function Sends({ matrix, note }: Props) {
  return (
    <Panel title="Who sends to whom" note={note}>
      {matrix ? (
        <Grid matrix={matrix} />
      ) : (
        !note && <p class="comm-quiet">Nothing was put on the wire.</p>
      )}
    </Panel>
  );
}

interface Frame {
  readonly matrix: Matrix;
  readonly cell: number; // pixels
  readonly side: number;
  readonly most: number;
}

function makeFrame(matrix: Matrix, width: number): Frame {
  const num = Math.max(matrix.ranks.length, 1);
  const room = Math.min(width - LEFT, MAX_SIDE);
  const cell = Math.min(room / num, MAX_CELL);
  // Whole pixels keep the lines between cells sharp.
  const size = cell >= 4 ? Math.floor(cell) : cell;
  return { matrix, cell: size, side: size * num, most: Math.max(0, ...matrix.num_bytes) };
}

const STEPS: Readonly<Record<string, readonly [number, number]>> = {
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
};

interface Place {
  readonly sender: number;
  readonly receiver: number;
}

function Grid({ matrix }: { matrix: Matrix }) {
  const box = useRef<HTMLDivElement>(null);
  const { width } = useSize(box);
  const [at, setAt] = useState<Place | null>(null);
  const frame = useMemo(() => makeFrame(matrix, width), [matrix, width]);
  const bytes = useMemo(() => indexBytes(matrix), [matrix]);
  const draw = useCallback((context: CanvasRenderingContext2D) => paint(context, frame), [frame]);
  const num = matrix.ranks.length;
  const point = (next: Place, x: number, y: number): void => {
    setAt(next);
    showTip(<PairTip matrix={matrix} at={next} bytes={bytes} />, x, y);
  };
  const leave = (): void => {
    setAt(null);
    hideTip();
  };
  const follow = (event: PointerEvent): void => {
    const place = (event.currentTarget as Element).getBoundingClientRect();
    const sender = Math.floor((event.clientY - place.top - TOP) / frame.cell);
    const receiver = Math.floor((event.clientX - place.left - LEFT) / frame.cell);
    const isInside = sender >= 0 && receiver >= 0 && sender < num && receiver < num;
    if (isInside) point({ sender, receiver }, event.clientX, event.clientY);
    else leave();
  };
  const step = (event: KeyboardEvent): void => {
    const move = STEPS[event.key];
    if (!move) return;
    event.preventDefault();
    const now = at ?? { sender: matrix.sender[0] ?? 0, receiver: matrix.receiver[0] ?? 0 };
    const next = {
      sender: limit(now.sender + (at ? move[0] : 0), num),
      receiver: limit(now.receiver + (at ? move[1] : 0), num),
    };
    const place = (event.currentTarget as Element).getBoundingClientRect();
    point(
      next,
      place.left + LEFT + (next.receiver + 1) * frame.cell,
      place.top + TOP + (next.sender + 1) * frame.cell,
    );
  };
  const shown = at ?? { sender: 0, receiver: 0 };
  return (
    <div
      ref={box}
      class="sends"
      role="slider"
      tabIndex={0}
      aria-label="bytes from rank to rank"
      aria-valuemin={0}
      aria-valuemax={num * num - 1}
      aria-valuenow={shown.sender * num + shown.receiver}
      aria-valuetext={describePair(matrix, shown, bytes)}
      onPointerMove={follow}
      onPointerLeave={leave}
      onKeyDown={step}
      onBlur={leave}
    >
      {width > 0 && (
        <Canvas width={LEFT + frame.side + 1} height={TOP + frame.side + 1} draw={draw} />
      )}
      {at && (
        <div
          class="sends-cursor"
          style={{
            left: `${LEFT + at.receiver * frame.cell}px`,
            top: `${TOP + at.sender * frame.cell}px`,
            width: `${frame.cell}px`,
            height: `${frame.cell}px`,
          }}
        />
      )}
    </div>
  );
}

function limit(value: number, num: number): number {
  return Math.min(Math.max(value, 0), num - 1);
}

/** By sender and receiver at once. */
function indexBytes({ ranks, sender, receiver, num_bytes }: Matrix): Map<number, number> {
  return new Map(
    num_bytes.map((value, i) => [sender[i]! * ranks.length + receiver[i]!, value] as const),
  );
}

function bytesAt(matrix: Matrix, at: Place, bytes: Map<number, number>): number {
  return bytes.get(at.sender * matrix.ranks.length + at.receiver) ?? 0;
}

function describePair(matrix: Matrix, at: Place, bytes: Map<number, number>): string {
  const { ranks } = matrix;
  const what = formatBytes(bytesAt(matrix, at, bytes));
  return `rank ${ranks[at.sender]} to rank ${ranks[at.receiver]}: ${what}`;
}

interface PairProps {
  readonly matrix: Matrix;
  readonly at: Place;
  readonly bytes: Map<number, number>;
}

function PairTip({ matrix, at, bytes }: PairProps) {
  const { mesh, world_size } = page.value.run;
  const name = (position: number) => {
    const rank = matrix.ranks[position]!;
    const place = placeOfRank(rank, mesh, world_size);
    return (
      <dd>
        rank {rank} {place && <span class="dim">{place}</span>}
      </dd>
    );
  };
  return (
    <>
      <div class="tooltip-title">{formatBytes(bytesAt(matrix, at, bytes))}</div>
      <dl>
        <dt>from</dt>
        {name(at.sender)}
        <dt>to</dt>
        {name(at.receiver)}
      </dl>
    </>
  );
}

function paint(context: CanvasRenderingContext2D, frame: Frame): void {
  const { matrix, cell, side, most } = frame;
  const gap = cell >= 5 ? 1 : 0;
  context.fillStyle = resolveColor("--heat-low");
  context.fillRect(LEFT, TOP, side, side);
  paintBlocks(context, frame);
  matrix.num_bytes.forEach((value, i) => {
    const x = LEFT + matrix.receiver[i]! * cell;
    const y = TOP + matrix.sender[i]! * cell;
    const share = most ? Math.sqrt(value / most) : 0;
    context.globalAlpha = 0.15 + 0.85 * share;
    context.fillStyle = resolveColor("--heat-high");
    context.fillRect(x, y, cell - gap, cell - gap);
    context.globalAlpha = 1;
    if (cell >= TEXT_CELL)
      paintFigure(context, formatBytes(value), x + cell / 2, y + cell / 2, share);
  });
  paintLabels(context, frame);
}

function paintFigure(
  context: CanvasRenderingContext2D,
  text: string,
  x: number,
  y: number,
  share: number,
): void {
  context.font = fontOf(0.84);
  context.fillStyle = resolveColor(share > HOT ? "--heat-text" : "--text");
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(text, x, y);
}

/** Lines between ranks that differ along more than the last axis of the mesh. */
function paintBlocks(context: CanvasRenderingContext2D, { matrix, cell, side }: Frame): void {
  const { mesh, world_size } = page.value.run;
  const block = blockOf(mesh, world_size);
  if (!block) return;
  context.strokeStyle = resolveColor("--line-strong");
  context.lineWidth = 1;
  context.beginPath();
  matrix.ranks.forEach((rank, i) => {
    if (!i || Math.floor(rank / block) === Math.floor(matrix.ranks[i - 1]! / block)) return;
    const at = Math.round(i * cell) - 0.5;
    context.moveTo(LEFT + at, TOP);
    context.lineTo(LEFT + at, TOP + side);
    context.moveTo(LEFT, TOP + at);
    context.lineTo(LEFT + side, TOP + at);
  });
  context.stroke();
}

function paintLabels(context: CanvasRenderingContext2D, { matrix, cell }: Frame): void {
  const step = labelStep(matrix.ranks.length, cell, 26);
  context.font = fontOf(0.8);
  context.fillStyle = resolveColor("--text-3");
  context.textAlign = "left";
  context.textBaseline = "bottom";
  context.fillText("from", 0, TOP + 2);
  context.fillText("to", 0, TOP - 12);
  matrix.ranks.forEach((rank, i) => {
    if (i % step) return;
    const middle = (i + 0.5) * cell;
    context.textAlign = "center";
    context.textBaseline = "bottom";
    context.fillText(String(rank), LEFT + middle, TOP - 4);
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText(String(rank), LEFT - 6, TOP + middle);
  });
}
