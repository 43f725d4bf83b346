/** Details of an op: schema, verdict and its reason, remedy, tried placements, call sites. */
import type { OpRow } from "../../page";
import { Badge } from "../../parts/badge";
import { ModuleLink } from "../../parts/module_link";
import { SourceLine } from "../../parts/source_line";
import { formatBytes, pluralize } from "../../parts/units";

const MAX_CALL_SITES = 12;

export function OpDetail({ op }: { op: OpRow }) {
  return (
    <div class="op-detail">
      <div class="op-head">
        <Badge word={op.verdict} />
        <code class="op-schema">{op.schema}</code>
      </div>
      {op.detail && <p>{op.detail}</p>}
      {op.remedy && <p class="remedy">{op.remedy}</p>}
      {op.moves.length > 0 && (
        <section>
          <h3>Redistributed inputs</h3>
          <ul>
            {op.moves.map((move, i) => (
              <li key={i} class="mono">
                {move}
              </li>
            ))}
          </ul>
        </section>
      )}
      {op.shardings.length > 0 && <Attempts op={op} />}
      <CallSites op={op} />
    </div>
  );
}

function Attempts({ op }: { op: OpRow }) {
  return (
    <section>
      <h3>What was tried</h3>
      <div class="scroll-x">
        <table class="plain-table">
          <thead>
            <tr>
              <th>inputs</th>
              <th>verdict</th>
              <th>outputs</th>
              <th class="end">sent</th>
              <th>detail</th>
            </tr>
          </thead>
          <tbody>
            {op.shardings.map((attempt, i) => (
              <tr key={i}>
                <td class="mono">{attempt.inputs || "all replicated"}</td>
                <td>
                  <Badge word={attempt.verdict} />
                </td>
                <td class="mono">{attempt.outputs}</td>
                <td class="end">{formatSent(attempt.num_bytes)}</td>
                <td>{attempt.detail}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function formatSent(numBytes: number | null): string {
  if (numBytes === null) return "–";
  return numBytes ? formatBytes(numBytes) : "·";
}

function CallSites({ op }: { op: OpRow }) {
  const { modules, sources } = op;
  if (!modules.length && !sources.length) return null;
  const more = modules.length - MAX_CALL_SITES;
  return (
    <section>
      <h3>Where it is called</h3>
      {modules.length > 0 && (
        <p class="op-modules">
          {modules.slice(0, MAX_CALL_SITES).map((module) => (
            <ModuleLink key={module} module={module} />
          ))}
          {more > 0 && <span class="dim">and {pluralize(more, "module")} more</span>}
        </p>
      )}
      {sources.slice(0, MAX_CALL_SITES).map((source) => (
        <SourceLine key={source} source={source} />
      ))}
    </section>
  );
}
