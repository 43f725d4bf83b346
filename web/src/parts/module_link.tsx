/** A module's name; clicking it selects the module in every view. */
import { useContext } from "preact/hooks";
import { moduleHref, moduleName, selected } from "../store/modules";
import { InCell } from "./facet_link";
import { Highlight } from "./highlight";

interface Props {
  readonly module: number; // position in the page's modules; -1 is none
  readonly view?: string; // to go to; the current view by default
  readonly text?: string; // in place of the path
}

export function ModuleLink({ module, view, text }: Props) {
  const isInCell = useContext(InCell);
  if (module < 0) return <span class="dim">{text ?? "outside any module"}</span>;
  const isSelected = module === selected.value;
  return (
    <a
      class="module-link"
      href={moduleHref(isSelected && !view ? -1 : module, view)}
      aria-current={isSelected ? "true" : undefined}
      title={moduleName(module)}
      tabIndex={isInCell ? -1 : undefined}
    >
      <Highlight text={text ?? moduleName(module)} />
    </a>
  );
}
