/** The selected module: its path, type and figures, with links to other views. */
import { Unfollowed } from "../../parts/unfollowed";
import { formatNumber } from "../../parts/units";
import { ownCollectives } from "../../store/module_traffic";
import { moduleHref, moduleName } from "../../store/modules";
import { page } from "../../store/page";
import { VIEWS } from "..";
import { isRecorded, MEASURES } from "./measures";

const LINKED_VIEWS = ["overview", "communication", "sharding", "coverage", "compiler", "memory"];

export function ModuleCard({ module }: { module: number }) {
  const { modules } = page.value;
  return (
    <section class="panel card" aria-label="selected module">
      <div class="card-head">
        <b class="mono wrap">{moduleName(module)}</b>
        <span class="dim">{modules.type[module]}</span>
        {modules.marks[module] && <span class="tree-marks">{modules.marks[module]}</span>}
      </div>
      <dl class="card-figures">
        {MEASURES.map(({ id, recorded, title, hint, sizeOf, format }) => (
          <div key={id} title={hint}>
            <dt>{title.toLowerCase()}</dt>
            <dd>
              {isRecorded(modules, recorded) ? format(sizeOf(modules, module)) : <NotRecorded />}
            </dd>
          </div>
        ))}
        <div title={page.value.run.checks}>
          <dt>findings</dt>
          <dd>
            {isRecorded(modules, "findings") ? (
              formatNumber(modules.num_findings[module] ?? 0)
            ) : (
              <NotRecorded />
            )}
          </dd>
        </div>
        <div class="card-what">
          <dt>own collectives</dt>
          <dd>
            {isRecorded(modules, "wire") ? ownCollectives.value[module] || "none" : <NotRecorded />}
          </dd>
        </div>
      </dl>
      <Unfollowed what="Parameters, memory and findings" follows={["module"]} />
      <nav class="card-links" aria-label="the module in other views">
        {VIEWS.filter((view) => LINKED_VIEWS.includes(view.id) && view.hasData(page.value)).map(
          (view) => (
            <a key={view.id} href={moduleHref(module, view.id)}>
              {view.title} →
            </a>
          ),
        )}
      </nav>
    </section>
  );
}

function NotRecorded() {
  return <span class="dim">not recorded</span>;
}
