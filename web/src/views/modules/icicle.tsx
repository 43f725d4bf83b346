/** The module tree as an icicle chart on a canvas: handles the pointer, keys and zoom. */
import { useCallback, useEffect, useId, useMemo, useRef, useState } from "preact/hooks";
import { Canvas, remPixels } from "../../parts/canvas";
import { hideTip, showTip } from "../../parts/tooltip";
import { useSize } from "../../parts/use_size";
import { page } from "../../store/page";
import { words } from "../../store/search";
import {
  type Box,
  findBoxAt,
  findViewport,
  type IcicleNode,
  listBoxes,
  moveByKey,
  type Viewport,
} from "./icicle_layout";
import { type IcicleModel, styleBox } from "./icicle_model";
import { paintIcicle } from "./icicle_painter";
import { BoxTip, describeBox } from "./icicle_tip";
import { labelOf } from "./tree_state";

const ROW = 1.95; // rem
const MOVE_MS = 160;

interface Props {
  readonly model: IcicleModel;
  readonly zoomed: IcicleNode | null; // has the full width
  readonly selected: IcicleNode | null;
  readonly maxDepth: number; // levels below the zoomed box
  readonly onSelect: (node: IcicleNode) => void;
  readonly onZoomOut: () => void;
}

export function Icicle({ model, zoomed, selected, maxDepth, onSelect, onZoomOut }: Props) {
  const container = useRef<HTMLDivElement>(null);
  const id = useId();
  const { width } = useSize(container);
  const [active, setActive] = useState<IcicleNode | null>(null);
  const rowHeight = Math.round(ROW * remPixels());
  const viewport = useMovingViewport(findViewport(zoomed));
  const lastDepth = maxDepth + (zoomed?.depth ?? 0);
  const boxes = useMemo(
    () => (width > 0 ? listBoxes(model.roots, viewport, width, lastDepth) : []),
    [model, viewport, width, lastDepth],
  );
  const numRows = boxes.reduce((max, box) => Math.max(max, box.depth + 1), 1);
  const searchWords = words.value;
  const draw = useCallback(
    (context: CanvasRenderingContext2D) => {
      const { modules } = page.value;
      const isAncestor = (node: IcicleNode): boolean => isAbove(node, zoomed);
      const input = { modules, model, labelOf, words: searchWords, isAncestor };
      const sizes = { rowHeight, rem: remPixels() };
      paintIcicle(context, boxes, (box) => styleBox(box, input), sizes);
    },
    [boxes, model, zoomed, searchWords, rowHeight],
  );
  const activate = (node: IcicleNode | null, x: number, y: number): void => {
    setActive(node);
    if (node) showTip(<BoxTip model={model} node={node} />, x, y);
    else hideTip();
  };
  const boxAt = (event: PointerEvent | MouseEvent): Box | null => {
    const { left, top } = container.current!.getBoundingClientRect();
    const depth = Math.floor((event.clientY - top) / rowHeight);
    return findBoxAt(boxes, event.clientX - left, depth);
  };
  const handleClick = (event: MouseEvent): void => {
    const node = boxAt(event)?.node;
    hideTip();
    if (node) onSelect(node);
  };
  const handleKey = (event: KeyboardEvent): void => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const next = moveByKey(boxes, active, event.key);
    if (next) {
      const box = boxes.find((candidate) => candidate.node?.id === next.id);
      const { left, top } = container.current!.getBoundingClientRect();
      activate(next, left + (box?.x ?? 0), top + (next.depth + 1) * rowHeight);
    } else if ((event.key === "Enter" || event.key === "+") && active) onSelect(active);
    else if (event.key === "Backspace" || event.key === "-") onZoomOut();
    else if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
  };
  const handleLeave = (): void => activate(null, 0, 0);
  return (
    <div
      ref={container}
      class="icicle"
      data-chart={`modules by ${model.measure.title.toLowerCase()}`}
      role="tree"
      tabIndex={0}
      aria-label={`modules by ${model.measure.title.toLowerCase()}`}
      aria-activedescendant={active ? `${id}-active` : undefined}
      style={{ height: `${numRows * rowHeight}px` }}
      onPointerMove={(event) => activate(boxAt(event)?.node ?? null, event.clientX, event.clientY)}
      onPointerLeave={handleLeave}
      onClick={handleClick}
      onKeyDown={handleKey}
      onBlur={handleLeave}
    >
      {width > 0 && <Canvas width={width} height={numRows * rowHeight} draw={draw} />}
      <Frame boxes={boxes} node={selected} rowHeight={rowHeight} kind="selected" />
      <Frame boxes={boxes} node={active} rowHeight={rowHeight} kind="active" />
      {active && (
        <div
          id={`${id}-active`}
          class="visually-hidden"
          role="treeitem"
          aria-level={active.depth + 1}
          aria-selected={active.id === selected?.id}
        >
          {describeBox(model, active)}
        </div>
      )}
    </div>
  );
}

/** The viewport, on its way to where it should be, unless the user asked for no motion. */
function useMovingViewport(target: Viewport): Viewport {
  const [viewport, setViewport] = useState(target);
  const current = useRef(target);
  useEffect(() => {
    const from = current.current;
    const move = (share: number): void => {
      const eased = 1 - (1 - share) ** 3;
      current.current = {
        left: from.left + (target.left - from.left) * eased,
        width: from.width + (target.width - from.width) * eased,
      };
      setViewport(current.current);
    };
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
      move(1);
      return;
    }
    const start = performance.now();
    let frame = 0;
    const step = (now: number): void => {
      const share = Math.min(Math.max((now - start) / MOVE_MS, 0), 1);
      move(share);
      if (share < 1) frame = requestAnimationFrame(step);
    };
    frame = requestAnimationFrame(step);
    return () => cancelAnimationFrame(frame);
  }, [target.left, target.width]);
  return viewport;
}

function isAbove(node: IcicleNode, below: IcicleNode | null): boolean {
  for (let above = below?.parent; above; above = above.parent)
    if (above.id === node.id) return true;
  return false;
}

interface FrameProps {
  readonly boxes: readonly Box[];
  readonly node: IcicleNode | null;
  readonly rowHeight: number;
  readonly kind: "active" | "selected";
}

/** A frame around a box, if it is drawn. */
function Frame({ boxes, node, rowHeight, kind }: FrameProps) {
  const box = node && boxes.find((candidate) => candidate.node?.id === node.id);
  if (!box) return null;
  return (
    <div
      class={`icicle-frame icicle-${kind}`}
      style={{
        left: `${box.x}px`,
        top: `${box.depth * rowHeight}px`,
        width: `${Math.max(box.width - 1, 2)}px`,
        height: `${rowHeight - 2}px`,
      }}
    />
  );
}
