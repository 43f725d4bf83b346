/** The selected module, which every view knows of. */
import { hrefOfModule, nameOf, select, selected } from "../store/modules";

export function SelectionChip() {
  if (selected.value < 0) return null;
  const name = nameOf(selected.value);
  return (
    <span class="selection">
      <span class="visually-hidden">selected module: </span>
      <a href={hrefOfModule(selected.value, "modules")} title={`${name}: show it in the tree`}>
        {/* The end of a path tells more than its beginning. */}
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
