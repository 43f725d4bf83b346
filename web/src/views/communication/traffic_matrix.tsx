/** Bytes between ranks: a row for each sender, a column for each receiver. */
import { useCallback, useMemo, useRef, useState } from "preact/hooks";
import type { Communication, Matrix } from "../../page";
import { Canvas, makeFont, remPixels } from "../../parts/canvas";
import { resolveColor } from "../../parts/colors";
import { Panel } from "../../parts/panel";
import { hideTip, showTip } from "../../parts/tooltip";
import { formatBytes } from "../../parts/units";
import { useSize } from "../../parts/use_size";
import { page } from "../../store/page";
import { route } from "../../store/route";
import { select, selectedFacets, selection } from "../../store/selection";
import { listMatrixFacets, selectMatrix } from "./matrix_parts";
import { countInnermostRanks, formatCoordinate, labelStep } from "./mesh";

// In rem
const LEFT = 3;
const TOP = 2.7;
const MAX_CELL = 5.2;
const MAX_SIDE = 46;
const TEXT_CELL = 4.2; // cells of this size have room for a label
const LABEL = 1.9;
const HOT = 0.6;
const FAINT = 0.08; // opacity of a cell with few bytes

/** The matrix, if it shows more than `Communication.matrix_summary` says in a sentence. */
export function TrafficMatrix({ communication }: { readonly communication: Communication }) {
  const { matrix, matrix_note: note, matrix_summary: summary } = communication;
  const facets = [route.value.params, matrix];
  const selected = useMemo(() => matrix && selectMatrix(matrix), facets);
  if (summary) return null;
  if (!selected || !matrix) {
    return (
      <Panel title="Traffic between ranks" note={note}>
        {!note && <p class="comm-quiet">Nothing was sent.</p>}
      </Panel>
    );
  }
  const follows = listMatrixFacets(matrix);
  const isPart = selectedFacets.value.some((facet) => follows.includes(facet));
  return (
    <Panel
      title="Traffic between ranks"
      note={`${note}${isPart ? " Of what is selected." : ""}`}
      follows={follows}
    >
      {!selected.num_bytes.length && <p class="comm-quiet">Nothing of it was sent.</p>}
      <Grid matrix={selected} />
    </Panel>
  );
}

/** Positions and sizes in pixels. */
interface Frame {
  readonly matrix: Matrix;
  readonly rem: number;
  readonly left: number;
  readonly top: number;
  readonly cell: number;
  readonly side: number;
  readonly max: number; // bytes
}

function makeFrame(matrix: Matrix, width: number): Frame {
  const rem = remPixels();
  const [left, top] = [LEFT * rem, TOP * rem];
  const numRanks = Math.max(matrix.ranks.length, 1);
  const cell = Math.min(Math.min(width - left, MAX_SIDE * rem) / numRanks, MAX_CELL * rem);
  // Whole pixels keep the lines between cells sharp.
  const size = cell >= 4 ? Math.floor(cell) : Math.max(cell, 1);
  const max = matrix.num_bytes.reduce((a, b) => Math.max(a, b), 0);
  return { matrix, rem, left, top, cell: size, side: size * numRanks, max };
}

const KEY_STEPS: Readonly<Record<string, readonly [number, number]>> = {
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
};

interface Pair {
  readonly sender: number;
  readonly receiver: number;
}

function Grid({ matrix }: { matrix: Matrix }) {
  const box = useRef<HTMLDivElement>(null);
  const { width } = useSize(box);
  const [pair, setPair] = useState<Pair | null>(null);
  const frame = useMemo(() => makeFrame(matrix, width), [matrix, width]);
  const bytes = useMemo(() => indexBytes(matrix), [matrix]);
  const draw = useCallback((context: CanvasRenderingContext2D) => paint(context, frame), [frame]);
  const numRanks = matrix.ranks.length;
  const showPair = (next: Pair, x: number, y: number): void => {
    setPair(next);
    showTip(<PairTip matrix={matrix} pair={next} bytes={bytes} />, x, y);
  };
  const handleLeave = (): void => {
    setPair(null);
    hideTip();
  };
  const handlePointerMove = (event: PointerEvent): void => {
    const bounds = (event.currentTarget as Element).getBoundingClientRect();
    const sender = Math.floor((event.clientY - bounds.top - frame.top) / frame.cell);
    const receiver = Math.floor((event.clientX - bounds.left - frame.left) / frame.cell);
    const isInside = sender >= 0 && receiver >= 0 && sender < numRanks && receiver < numRanks;
    if (isInside) showPair({ sender, receiver }, event.clientX, event.clientY);
    else handleLeave();
  };
  const selectSender = (): void => {
    if (!pair) return;
    const sender = matrix.ranks[pair.sender]!;
    select("rank", sender === selection.value.rank ? null : String(sender));
  };
  const handleKey = (event: KeyboardEvent): void => {
    if (event.key === "Enter") selectSender();
    const keyStep = KEY_STEPS[event.key];
    if (!keyStep) return;
    event.preventDefault();
    const current = pair ?? { sender: matrix.sender[0] ?? 0, receiver: matrix.receiver[0] ?? 0 };
    const next = {
      sender: clampIndex(current.sender + (pair ? keyStep[0] : 0), numRanks),
      receiver: clampIndex(current.receiver + (pair ? keyStep[1] : 0), numRanks),
    };
    const bounds = (event.currentTarget as Element).getBoundingClientRect();
    showPair(
      next,
      bounds.left + frame.left + (next.receiver + 1) * frame.cell,
      bounds.top + frame.top + (next.sender + 1) * frame.cell,
    );
  };
  const shownPair = pair ?? { sender: 0, receiver: 0 };
  return (
    <div
      ref={box}
      class="traffic-matrix"
      role="slider"
      tabIndex={0}
      aria-label="bytes from rank to rank"
      aria-valuemin={0}
      aria-valuemax={numRanks * numRanks - 1}
      aria-valuenow={shownPair.sender * numRanks + shownPair.receiver}
      aria-valuetext={describePair(matrix, shownPair, bytes)}
      onPointerMove={handlePointerMove}
      onPointerLeave={handleLeave}
      onClick={selectSender}
      onKeyDown={handleKey}
      onBlur={handleLeave}
    >
      {width > 0 && (
        <Canvas
          width={frame.left + frame.side + 1}
          height={frame.top + frame.side + 1}
          draw={draw}
        />
      )}
      {pair && (
        <div
          class="traffic-cursor"
          style={{
            left: `${frame.left + pair.receiver * frame.cell}px`,
            top: `${frame.top + pair.sender * frame.cell}px`,
            width: `${frame.cell}px`,
            height: `${frame.cell}px`,
          }}
        />
      )}
    </div>
  );
}

function clampIndex(value: number, numRanks: number): number {
  return Math.min(Math.max(value, 0), numRanks - 1);
}

/** Bytes by sender * number of ranks + receiver. */
function indexBytes({ ranks, sender, receiver, num_bytes }: Matrix): Map<number, number> {
  return new Map(
    num_bytes.map((value, i) => [sender[i]! * ranks.length + receiver[i]!, value] as const),
  );
}

function bytesAt(matrix: Matrix, pair: Pair, bytes: Map<number, number>): number {
  return bytes.get(pair.sender * matrix.ranks.length + pair.receiver) ?? 0;
}

function describePair(matrix: Matrix, pair: Pair, bytes: Map<number, number>): string {
  const { ranks } = matrix;
  const what = formatBytes(bytesAt(matrix, pair, bytes));
  return `rank ${ranks[pair.sender]} to rank ${ranks[pair.receiver]}: ${what}`;
}

interface PairProps {
  readonly matrix: Matrix;
  readonly pair: Pair;
  readonly bytes: Map<number, number>;
}

function PairTip({ matrix, pair, bytes }: PairProps) {
  const { mesh, world_size } = page.value.run;
  const describeRank = (position: number) => {
    const rank = matrix.ranks[position]!;
    const coordinate = formatCoordinate(rank, mesh, world_size);
    return (
      <dd>
        rank {rank} {coordinate && <span class="dim">{coordinate}</span>}
      </dd>
    );
  };
  return (
    <>
      <div class="tooltip-title">{formatBytes(bytesAt(matrix, pair, bytes))}</div>
      <dl>
        <dt>from</dt>
        {describeRank(pair.sender)}
        <dt>to</dt>
        {describeRank(pair.receiver)}
      </dl>
      <div class="dim">Click to select the sender.</div>
    </>
  );
}

function paint(context: CanvasRenderingContext2D, frame: Frame): void {
  const { matrix, rem, left, top, cell, side, max } = frame;
  const gap = cell >= 5 ? 1 : 0;
  context.fillStyle = resolveColor("--heat-low");
  context.fillRect(left, top, side, side);
  paintBlocks(context, frame);
  matrix.num_bytes.forEach((value, i) => {
    const x = left + matrix.receiver[i]! * cell;
    const y = top + matrix.sender[i]! * cell;
    const share = max ? value / max : 0;
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
  context.font = makeFont(0.84);
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
  const block = countInnermostRanks(mesh, world_size);
  if (!block) return;
  context.strokeStyle = resolveColor("--line-strong");
  context.lineWidth = 1;
  context.beginPath();
  matrix.ranks.forEach((rank, i) => {
    if (!i || Math.floor(rank / block) === Math.floor(matrix.ranks[i - 1]! / block)) return;
    const offset = Math.round(i * cell) - 0.5;
    context.moveTo(left + offset, top);
    context.lineTo(left + offset, top + side);
    context.moveTo(left, top + offset);
    context.lineTo(left + side, top + offset);
  });
  context.stroke();
}

function paintLabels(
  context: CanvasRenderingContext2D,
  { matrix, rem, left, top, cell }: Frame,
): void {
  const step = labelStep(matrix.ranks.length, cell, LABEL * rem);
  context.font = makeFont(0.8);
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
