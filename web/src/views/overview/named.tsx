/** Modules that a search matches: the overview lists none, and must not seem to know of none. */
import { ModuleLink } from "../../parts/module_link";
import { Panel } from "../../parts/panel";
import { formatNumber } from "../../parts/units";
import { nameOf } from "../../store/modules";
import { page } from "../../store/page";
import { hrefTo } from "../../store/route";
import { hasWords, words } from "../../store/search";

const FIRST = 8;

export function Named() {
  if (!words.value.length) return null;
  const found = [...page.value.modules.path.keys()].filter((position) =>
    hasWords(nameOf(position), words.value),
  );
  if (!found.length) return null;
  const numHidden = found.length - FIRST;
  return (
    <Panel title={`Matching modules (${formatNumber(found.length)})`}>
      <ul class="named">
        {found.slice(0, FIRST).map((position) => (
          <li key={position}>
            <ModuleLink module={position} view="modules" />
          </li>
        ))}
        {numHidden > 0 && (
          <li>
            <a class="text-button" href={hrefTo("modules")}>
              and {formatNumber(numHidden)} more
            </a>
          </li>
        )}
      </ul>
    </Panel>
  );
}
