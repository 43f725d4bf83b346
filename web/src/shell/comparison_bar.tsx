/** That the page is compared with a file that was dropped onto it, in every view. */
import { earlier, forgetDropped, isDropped } from "../store/earlier";
import { hrefTo, route } from "../store/route";
import { findView } from "../views";

export function ComparisonBar() {
  if (!isDropped.value) return null;
  const isCompare = findView(route.value.view).id === "compare";
  return (
    <section class="selection-bar comparison-bar" aria-label="comparison">
      <p role="status">
        Compared with <b class="mono">{earlier.value!.name}</b>
        {!isCompare && (
          <>
            . <a href={hrefTo("compare")}>Show all differences</a>
          </>
        )}
      </p>
      <button type="button" class="text-button" onClick={forgetDropped}>
        End comparison
      </button>
    </section>
  );
}
