/** What the icicle chart says about one box: its tooltip, and a sentence for screen readers. */
import { seriesColor } from "../../parts/colors";
import { formatShare, pluralize } from "../../parts/units";
import { earlierModules } from "../../store/earlier_modules";
import { moduleName } from "../../store/modules";
import { page } from "../../store/page";
import { nameRepresented } from "./folded_sums";
import type { IcicleNode } from "./icicle_layout";
import {
  formatChange,
  formatEachLayer,
  formatTotalShare,
  type IcicleModel,
  isBound,
} from "./icicle_model";

interface Props {
  readonly model: IcicleModel;
  readonly node: IcicleNode;
}

/** `layers.{0…31}.attention: 768 MiB`. */
export function describeBox(model: IcicleModel, node: IcicleNode): string {
  const { measure, earlier } = model;
  const name = nameBox(model, node);
  if (node.module < 0) return `${name}: gone, was ${measure.format(node.size)}`;
  const size = model.sizes[node.module]!;
  const change = earlier
    ? `, ${formatChange(size, earlier[node.module]!, measure.format)}`
    : `, ${formatTotalShare(model, node)} of the total`;
  return `${name}: ${measure.format(size)}${change}`;
}

export function nameBox(model: IcicleModel, { module, gone }: IcicleNode): string {
  const { modules } = page.value;
  if (module < 0) return earlierModules.value!.gone[gone]!.name;
  return nameRepresented(modules, model.shown, module) || moduleName(module);
}

export function BoxTip({ model, node }: Props) {
  const { modules } = page.value;
  if (node.module < 0) return <GoneTip model={model} node={node} />;
  const { measure, numRepresented } = model;
  const size = model.sizes[node.module]!;
  const number = numRepresented[node.module]!;
  const text = `${isBound(measure, node.module) ? "≤ " : ""}${measure.format(size)}`;
  return (
    <>
      <div class="tooltip-title">{nameBox(model, node)}</div>
      <div class="dim">{modules.type[node.module]}</div>
      <dl>
        <dt>{measure.title.toLowerCase()}</dt>
        <dd>
          {text}
          {number > 1 && ` in all ${number}, ${formatEachLayer(model, node.module)}`}
        </dd>
        <dt>its own</dt>
        <dd>{measure.format(node.own)}</dd>
        <dt>of the total</dt>
        <dd>{formatTotalShare(model, node)}</dd>
        {node.parent && (
          <>
            <dt>of its parent</dt>
            <dd>{formatShare(node.width, node.parent.width)}</dd>
          </>
        )}
        {model.earlier && (
          <>
            <dt>before</dt>
            <dd>
              {measure.format(model.earlier[node.module]!)}:{" "}
              {formatChange(size, model.earlier[node.module]!, measure.format)}
            </dd>
          </>
        )}
      </dl>
      <PartList model={model} module={node.module} />
    </>
  );
}

function GoneTip({ model, node }: Props) {
  const gone = earlierModules.value!.gone[node.gone]!;
  return (
    <>
      <div class="tooltip-title">{gone.name}</div>
      <div>
        Only in the earlier recording: {pluralize(gone.num_modules, "module")},{" "}
        {model.measure.format(node.size)}.
      </div>
    </>
  );
}

function PartList({ model, module }: { readonly model: IcicleModel; readonly module: number }) {
  const rows = model.legend.flatMap((item, i) => {
    const value = model.parts[i]![module]!;
    return value > 0 ? [{ ...item, value }] : [];
  });
  if (!rows.length || model.earlier) return null;
  return (
    <dl>
      {rows.map(({ name, series, value }) => (
        <>
          <dt>
            <span class="swatch" style={{ background: seriesColor(series) }} /> {name}
          </dt>
          <dd>
            {model.measure.format(value)}{" "}
            <span class="dim">{formatShare(value, model.sizes[module]!)}</span>
          </dd>
        </>
      ))}
    </dl>
  );
}
