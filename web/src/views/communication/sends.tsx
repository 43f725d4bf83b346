/** Who sends to whom: a row for each sender, a column for each receiver. */
import { useCallback, useMemo, useRef, useState } from "preact/hooks";
import type { Matrix } from "../../page";
import { Canvas, fontOf, remPixels } from "../../parts/canvas";
import { resolveColor } from "../../parts/colors";
import { Panel } from "../../parts/panel";
import { useSize } from "../../parts/size";
import { hideTip, showTip } from "../../parts/tooltip";
import { formatBytes } from "../../parts/units";
import { page } from "../../store/page";
import { blockOf, labelStep, placeOfRank } from "./mesh";

// In rem
const LEFT = 3;
const TOP = 2.7;
const MAX_CELL = 5.2;
const MAX_SIDE = 46;
const TEXT_CELL = 4.2; // from here on a cell has room for its figure
const LABEL = 1.9;
const HOT = 0.6;
const FAINT = 0.08; // strength of a cell in which next to nothing was sent

interface Props {
  readonly matrix: Matrix | null;
  readonly note: string;
}

export function Sends({ matrix, note }: Props) {
  return (
    <Panel title="Who sends to whom" note={note}>
      {matrix ? <Grid matrix={matrix} /> : !note && <p class="comm-quiet">Nothing was sent.</p>}
    </Panel>
  );
}

/** Where things are, in pixels. */
interface Frame {
  readonly matrix: Matrix;
  readonly rem: number;
  readonly left: number;
  readonly top: number;
  readonly cell: number;
  readonly side: number;
  readonly most: number; // bytes
}

function makeFrame(matrix: Matrix, width: number): Frame {
  const rem = remPixels();
  const [left, top] = [LEFT * rem, TOP * rem];
  const num = Math.max(matrix.ranks.length, 1);
  const cell = Math.min(Math.min(width - left, MAX_SIDE * rem) / num, MAX_CELL * rem);
  // Whole pixels keep the lines between cells sharp.
  const size = cell >= 4 ? Math.floor(cell) : Math.max(cell, 1);
  const most = matrix.num_bytes.reduce((a, b) => Math.max(a, b), 0);
  return { matrix, rem, left, top, cell: size, side: size * num, most };
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
    const sender = Math.floor((event.clientY - place.top - frame.top) / frame.cell);
    const receiver = Math.floor((event.clientX - place.left - frame.left) / frame.cell);
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
      place.left + frame.left + (next.receiver + 1) * frame.cell,
      place.top + frame.top + (next.sender + 1) * frame.cell,
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
        <Canvas
          width={frame.left + frame.side + 1}
          height={frame.top + frame.side + 1}
          draw={draw}
        />
      )}
      {at && (
        <div
          class="sends-cursor"
          style={{
            left: `${frame.left + at.receiver * frame.cell}px`,
            top: `${frame.top + at.sender * frame.cell}px`,
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
  const { matrix, rem, left, top, cell, side, most } = frame;
  const gap = cell >= 5 ? 1 : 0;
  context.fillStyle = resolveColor("--heat-low");
  context.fillRect(left, top, side, side);
  paintBlocks(context, frame);
  matrix.num_bytes.forEach((value, i) => {
    const x = left + matrix.receiver[i]! * cell;
    const y = top + matrix.sender[i]! * cell;
    const share = most ? value / most : 0;
    context.globalAlpha = FAINT + (1 - FAINT) * share;
    context.fillStyle = resolveColor("--heat-high");
    context.fillRect(x, y, cell - gap, cell - gap);
    context.globalAlpha = 1;
    if (cell >= TEXT_CELL * rem)
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
function paintBlocks(
  context: CanvasRenderingContext2D,
  { matrix, left, top, cell, side }: Frame,
): void {
  const { mesh, world_size } = page.value.run;
  const block = blockOf(mesh, world_size);
  if (!block) return;
  context.strokeStyle = resolveColor("--line-strong");
  context.lineWidth = 1;
  context.beginPath();
  matrix.ranks.forEach((rank, i) => {
    if (!i || Math.floor(rank / block) === Math.floor(matrix.ranks[i - 1]! / block)) return;
    const at = Math.round(i * cell) - 0.5;
    context.moveTo(left + at, top);
    context.lineTo(left + at, top + side);
    context.moveTo(left, top + at);
    context.lineTo(left + side, top + at);
  });
  context.stroke();
}

function paintLabels(
  context: CanvasRenderingContext2D,
  { matrix, rem, left, top, cell }: Frame,
): void {
  const step = labelStep(matrix.ranks.length, cell, LABEL * rem);
  context.font = fontOf(0.8);
  context.fillStyle = resolveColor("--text-3");
  context.textAlign = "left";
  context.textBaseline = "bottom";
  context.fillText("from ↓ to →", 0, top - 1.5 * rem);
  matrix.ranks.forEach((rank, i) => {
    if (i % step) return;
    const middle = (i + 0.5) * cell;
    context.textAlign = "center";
    context.textBaseline = "bottom";
    context.fillText(String(rank), left + middle, top - 4);
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText(String(rank), left - 6, top + middle);
  });
}
