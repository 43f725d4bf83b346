/** The module tree as an icicle chart: width is the measure, colour the module's own share of it. */
import { useMemo, useRef } from "preact/hooks";
import { heatColor } from "../../parts/colors";
import { hideTip, tip } from "../../parts/tooltip";
import { formatNumber, formatShare } from "../../parts/units";
import { useSize } from "../../parts/use_size";
import { moduleName, select, selected } from "../../store/modules";
import { page } from "../../store/page";
import { containsWords, words } from "../../store/search";
import { type Box, layoutIcicle } from "./icicle_layout";
import type { Measure } from "./measures";
import { hasChildren, isFoldedAway } from "./tree_rows";
import { depths, labelOf, treeState, zoomed } from "./tree_state";

const MAX_DEPTH = 8;
const MIN_PIXELS = 2;
const LABEL_PIXELS = 34;
const HOT_SHARE = 0.45; // above this the background is strong and the text light

export function Icicle({ measure }: { measure: Measure }) {
  const container = useRef<HTMLDivElement>(null);
  const { width } = useSize(container);
  const { modules } = page.value;
  const boxes = useMemo(
    () =>
      layoutIcicle({
        modules,
        sizeOf: (position) => measure.sizeOf(modules, position),
        zoomed: zoomed.value,
        isFolded: (position) => isFoldedAway(modules, position, treeState.value),
        minWidth: MIN_PIXELS / Math.max(width, 1),
        maxDepth: MAX_DEPTH + (depths.value[zoomed.value] ?? 0),
      }),
    [modules, measure, zoomed.value, treeState.value, width],
  );
  const total = sumRoots(measure);
  const zoomedTotal = boxes.find((box) => box.module === zoomed.value)?.value ?? total;
  const numRows = boxes.reduce((max, box) => Math.max(max, box.depth + 1), 0);
  return (
    <div
      ref={container}
      class="icicle"
      data-chart={`modules by ${measure.title.toLowerCase()}`}
      role="group"
      aria-label={`modules by ${measure.title.toLowerCase()}`}
      style={{ "--rows": numRows }}
    >
      {width > 0 &&
        boxes.map((box) => (
          <IcicleBox
            key={box.module}
            box={box}
            measure={measure}
            total={total}
            zoomedTotal={zoomedTotal}
            pixels={width * box.width}
          />
        ))}
    </div>
  );
}

function sumRoots(measure: Measure): number {
  const { modules } = page.value;
  return modules.parent.reduce(
    (sum, parent, i) => (parent < 0 ? sum + measure.sizeOf(modules, i) : sum),
    0,
  );
}

interface BoxProps {
  readonly box: Box;
  readonly total: number; // of all modules
  readonly zoomedTotal: number; // of the modules that have the full width
  readonly measure: Measure;
  readonly pixels: number;
}

function IcicleBox({ box, total, zoomedTotal, measure, pixels }: BoxProps) {
  const { modules } = page.value;
  const { module } = box;
  const share = zoomedTotal > 0 ? box.own / zoomedTotal : 0;
  const isAncestor = zoomed.value > module && box.width === 1;
  const isFaded = words.value.length > 0 && !containsWords(modules.path[module]!, words.value);
  const zoom = (): void => {
    hideTip();
    const isZoomingOut = module === zoomed.value;
    zoomed.value = isZoomingOut
      ? (modules.parent[module] ?? -1)
      : hasChildren(modules, module)
        ? module
        : zoomed.value;
    if (module !== selected.value) select(module);
  };
  const classes = [
    "box",
    share > HOT_SHARE && !isAncestor && "box-hot",
    isAncestor && "box-ancestor",
    isFaded && "box-faded",
  ];
  return (
    <button
      type="button"
      class={classes.filter(Boolean).join(" ")}
      aria-pressed={module === selected.value}
      aria-label={`${moduleName(module)}: ${measure.format(box.value)}`}
      style={{
        left: `${100 * box.left}%`,
        width: `${100 * box.width}%`,
        top: `calc(${box.depth} * var(--box-height))`,
        background: isAncestor ? undefined : heatColor(share),
      }}
      onClick={zoom}
      {...tip(() => <BoxTip box={box} total={total} measure={measure} />)}
    >
      {pixels > LABEL_PIXELS && (
        <span class="box-label">
          <span class="clip">{labelOf(module)}</span>
          {pixels > 4 * LABEL_PIXELS && <span class="box-value">{measure.format(box.value)}</span>}
        </span>
      )}
    </button>
  );
}

function BoxTip({ box, total, measure }: Omit<BoxProps, "pixels" | "zoomedTotal">) {
  const { modules } = page.value;
  const each = measure.sizeOf(modules, box.module);
  return (
    <>
      <div class="tooltip-title">{moduleName(box.module)}</div>
      <div class="dim">{modules.type[box.module]}</div>
      <dl>
        <dt>{measure.title.toLowerCase()}</dt>
        <dd>{measure.format(box.value)}</dd>
        {each !== box.value && (
          <>
            <dt>each of {formatNumber(Math.round(box.value / each))}</dt>
            <dd>{measure.format(each)}</dd>
          </>
        )}
        <dt>its own</dt>
        <dd>{measure.format(box.own)}</dd>
        <dt>share of the total</dt>
        <dd>{formatShare(box.value, total)}</dd>
      </dl>
    </>
  );
}
