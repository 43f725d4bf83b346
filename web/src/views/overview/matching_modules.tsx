/** Modules that match the search; the overview shows them above the findings. */
import { ModuleLink } from "../../parts/module_link";
import { Panel } from "../../parts/panel";
import { formatNumber } from "../../parts/units";
import { moduleName } from "../../store/modules";
import { page } from "../../store/page";
import { hrefTo } from "../../store/route";
import { containsWords, words } from "../../store/search";

const MAX_LINKS = 8;

export function MatchingModules() {
  if (!words.value.length) return null;
  const positions = [...page.value.modules.path.keys()].filter((position) =>
    containsWords(moduleName(position), words.value),
  );
  if (!positions.length) return null;
  const numHidden = positions.length - MAX_LINKS;
  return (
    <Panel title={`Matching modules (${formatNumber(positions.length)})`}>
      <ul class="matching-modules">
        {positions.slice(0, MAX_LINKS).map((position) => (
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
