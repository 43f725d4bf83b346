/** The module tree as an icicle: width is the measure, darkness what is a module's own. */
import { useMemo, useRef } from "preact/hooks";
import { heatOf } from "../../parts/colors";
import { useSize } from "../../parts/size";
import { hideTip, tip } from "../../parts/tooltip";
import { formatNumber, formatShare } from "../../parts/units";
import { nameOf, select, selected } from "../../store/modules";
import { page } from "../../store/page";
import { hasWords, words } from "../../store/search";
import { type Box, layOut } from "./layout";
import type { Measure } from "./measures";
import { hasChildren, isFoldedAway } from "./rows";
import { openness, zoomed } from "./state";

const MAX_DEPTH = 8;
const MIN_PIXELS = 2;
const LABEL_PIXELS = 34;

export function Icicle({ measure }: { measure: Measure }) {
  const frame = useRef<HTMLDivElement>(null);
  const { width } = useSize(frame);
  const { modules } = page.value;
  const boxes = useMemo(
    () =>
      layOut({
        modules,
        sizeOf: (position) => measure.sizeOf(modules, position),
        zoomed: zoomed.value,
        isFolded: (position) => isFoldedAway(modules, position, openness.value),
        minWidth: MIN_PIXELS / Math.max(width, 1),
        maxDepth: MAX_DEPTH,
      }),
    [modules, measure, zoomed.value, openness.value, width],
  );
  const numRows = boxes.reduce((most, box) => Math.max(most, box.depth + 1), 0);
  return (
    <div
      ref={frame}
      class="icicle"
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
            whole={boxes[0]!}
            pixels={width * box.width}
          />
        ))}
    </div>
  );
}

interface BoxProps {
  readonly box: Box;
  readonly whole: Box;
  readonly measure: Measure;
  readonly pixels: number;
}

function IcicleBox({ box, whole, measure, pixels }: BoxProps) {
  const { modules } = page.value;
  const { module } = box;
  const share = whole.value > 0 ? box.own / whole.value : 0;
  const isAbove =
    zoomed.value >= 0 && module < zoomed.value && module !== zoomed.value && box.width === 1;
  const isFaded = words.value.length > 0 && !hasWords(modules.path[module]!, words.value);
  const zoom = (): void => {
    hideTip();
    const isOut = module === zoomed.value;
    zoomed.value = isOut
      ? (modules.parent[module] ?? -1)
      : hasChildren(modules, module)
        ? module
        : zoomed.value;
    if (module !== selected.value) select(module);
  };
  const classes = [
    "box",
    share > 0.25 && !isAbove && "box-hot",
    isAbove && "box-above",
    isFaded && "box-faded",
  ];
  return (
    <button
      type="button"
      class={classes.filter(Boolean).join(" ")}
      aria-pressed={module === selected.value}
      aria-label={`${nameOf(module)}: ${measure.format(box.value)}`}
      style={{
        left: `${100 * box.left}%`,
        width: `${100 * box.width}%`,
        top: `calc(${box.depth} * var(--box-height))`,
        background: isAbove ? undefined : heatOf(share),
      }}
      onClick={zoom}
      {...tip(() => <BoxTip box={box} whole={whole} measure={measure} />)}
    >
      {pixels > LABEL_PIXELS && (
        <span class="box-label">
          {modules.label[module]}
          {pixels > 4 * LABEL_PIXELS && <span class="box-value">{measure.format(box.value)}</span>}
        </span>
      )}
    </button>
  );
}

function BoxTip({ box, whole, measure }: Omit<BoxProps, "pixels">) {
  const { modules } = page.value;
  const each = measure.sizeOf(modules, box.module);
  return (
    <>
      <div class="tooltip-title">{nameOf(box.module)}</div>
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
        <dt>share of the whole</dt>
        <dd>{formatShare(box.value, whole.value)}</dd>
      </dl>
    </>
  );
}
