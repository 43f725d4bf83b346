/** The selected module: where it is, what it is, how much of everything, and where to read on. */
import { ModuleLink } from "../../parts/module_link";
import { formatNumber } from "../../parts/units";
import { ancestorsOf, hrefOfModule, nameOf } from "../../store/modules";
import { page } from "../../store/page";
import { VIEWS } from "..";
import { MEASURES } from "./measures";

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
        {MEASURES.map(({ id, title, hint, sizeOf, format }) => (
          <div key={id} title={hint}>
            <dt>{title.toLowerCase()}</dt>
            <dd>{format(sizeOf(modules, module))}</dd>
          </div>
        ))}
        <div>
          <dt>findings</dt>
          <dd>{formatNumber(modules.num_findings[module] ?? 0)}</dd>
        </div>
        <div class="card-what">
          <dt>says itself</dt>
          <dd>{modules.what[module] || "nothing"}</dd>
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
