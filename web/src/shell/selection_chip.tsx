/** The selected module, which every view filters by. */
import { moduleHref, moduleName, select, selected } from "../store/modules";

export function SelectionChip() {
  if (selected.value < 0) return null;
  const name = moduleName(selected.value);
  return (
    <span class="selection">
      <span class="visually-hidden">selected module: </span>
      <a href={moduleHref(selected.value, "modules")} title={`${name}: show it in the tree`}>
        {/* The end of a path is more informative than its beginning. */}
        <bdi>{name}</bdi>
      </a>
      <button
        type="button"
        title="Clear selection (Esc)"
        aria-label="Clear selection"
        onClick={() => select(-1)}
      >
        ×
      </button>
    </span>
  );
}
