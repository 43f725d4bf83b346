/** One op: its schema, why it got its verdict, what to do, what was tried, and where it is called. */
import type { OpRow } from "../../page";
import { Badge } from "../../parts/badge";
import { ModuleLink } from "../../parts/module_link";
import { SourceLine } from "../../parts/source_line";
import { countOf, formatBytes } from "../../parts/units";

const MAX_PLACES = 12;

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
      {op.shardings.length > 0 && <Tried op={op} />}
      <Places op={op} />
    </div>
  );
}

function Tried({ op }: { op: OpRow }) {
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
            {op.shardings.map((one, i) => (
              <tr key={i}>
                <td class="mono">{one.inputs || "all replicated"}</td>
                <td>
                  <Badge word={one.verdict} />
                </td>
                <td class="mono">{one.outputs}</td>
                <td class="end">{formatSent(one.num_bytes)}</td>
                <td>{one.detail}</td>
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

function Places({ op }: { op: OpRow }) {
  const { modules, sources } = op;
  if (!modules.length && !sources.length) return null;
  const more = modules.length - MAX_PLACES;
  return (
    <section>
      <h3>Where it is called</h3>
      {modules.length > 0 && (
        <p class="op-modules">
          {modules.slice(0, MAX_PLACES).map((module) => (
            <ModuleLink key={module} module={module} />
          ))}
          {more > 0 && <span class="dim">and {countOf(more, "module")} more</span>}
        </p>
      )}
      {sources.slice(0, MAX_PLACES).map((source) => (
        <SourceLine key={source} source={source} />
      ))}
    </section>
  );
}
