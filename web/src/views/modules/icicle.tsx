/** The module tree as an icicle: width is the measure, colour what is a module's own. */
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
import { depths, labelOf, openness, zoomed } from "./state";

const MAX_DEPTH = 8;
const MIN_PIXELS = 2;
const LABEL_PIXELS = 34;
const HOT_SHARE = 0.45; // from here on the ground is strong, and text light

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
        maxDepth: MAX_DEPTH + (depths.value[zoomed.value] ?? 0),
      }),
    [modules, measure, zoomed.value, openness.value, width],
  );
  const whole = sumRoots(measure);
  const shown = boxes.find((box) => box.module === zoomed.value)?.value ?? whole;
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
            whole={whole}
            shown={shown}
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
  readonly whole: number; // of all modules
  readonly shown: number; // of those that have the whole width
  readonly measure: Measure;
  readonly pixels: number;
}

function IcicleBox({ box, whole, shown, measure, pixels }: BoxProps) {
  const { modules } = page.value;
  const { module } = box;
  const share = shown > 0 ? box.own / shown : 0;
  const isAbove = zoomed.value > module && box.width === 1;
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
    share > HOT_SHARE && !isAbove && "box-hot",
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
          <span class="clip">{labelOf(module)}</span>
          {pixels > 4 * LABEL_PIXELS && <span class="box-value">{measure.format(box.value)}</span>}
        </span>
      )}
    </button>
  );
}

function BoxTip({ box, whole, measure }: Omit<BoxProps, "pixels" | "shown">) {
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
        <dt>share of the total</dt>
        <dd>{formatShare(box.value, whole)}</dd>
      </dl>
    </>
  );
}
