/** The selected module: where it is, what it is, how much of everything, and where to read on. */
import { ModuleLink } from "../../parts/module_link";
import { formatNumber } from "../../parts/units";
import { ancestorsOf, hrefOfModule, nameOf } from "../../store/modules";
import { page } from "../../store/page";
import { VIEWS } from "..";
import { isRecorded, MEASURES } from "./measures";

const ELSEWHERE = ["overview", "communication", "sharding", "coverage", "compiler", "memory"];

export function ModuleCard({ module }: { module: number }) {
  const { modules } = page.value;
  return (
    <section class="panel card" aria-label="selected module">
      <div class="card-head">
        <Trail module={module} />
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
          <dd>{isRecorded(modules, "wire") ? modules.what[module] || "none" : <NotRecorded />}</dd>
        </div>
      </dl>
      <nav class="card-links" aria-label="the module in other views">
        {VIEWS.filter((view) => ELSEWHERE.includes(view.id) && view.hasData(page.value)).map(
          (view) => (
            <a key={view.id} href={hrefOfModule(module, view.id)}>
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

function Trail({ module }: { module: number }) {
  const { modules } = page.value;
  return (
    <span class="trail">
      {ancestorsOf(module).map((one) => (
        <span key={one}>
          <ModuleLink module={one} text={modules.label[one]!} /> <span class="dim">/ </span>
        </span>
      ))}
      <b class="mono" title={nameOf(module)}>
        {modules.label[module]}
      </b>
    </span>
  );
}
