/** The verdict: what dominates or is wrong, whether that is bad, and what was not checked. */
import type { ConcernItem, VerdictItem } from "../../page";
import { ToneMark, toneOf } from "../../parts/badge";
import { Command } from "../../parts/command";
import { CopyButton } from "../../parts/copy_button";
import { ModuleLink } from "../../parts/module_link";
import { SourceLine } from "../../parts/source_line";
import { page } from "../../store/page";
import { hrefTo } from "../../store/route";
import { selectedFacets } from "../../store/selection";

const MAX_CONCERNS = 6; // beside the first

export function Verdict() {
  const { verdict } = page.value;
  const concern = verdict?.concerns[0];
  if (!verdict || !concern) return null;
  const tone = toneOf(concern.judgement);
  return (
    <section class={`judgement tone-${tone} judgement-${tone}`} aria-label="Verdict">
      <header class="judgement-head">
        <ToneMark tone={tone} />
        <h2>{concern.label}</h2>
        <CopyButton text={verdict.sentence} label="copy the verdict" />
      </header>
      <p class="judgement-fact">
        <Words concern={concern} />
      </p>
      <div class="judgement-places">
        {concern.view && (
          <a class="judgement-more" href={hrefTo(concern.view)}>
            show it
          </a>
        )}
        {concern.module >= 0 && <ModuleLink module={concern.module} text={concern.path} />}
        <SourceLine source={concern.source} isShort />
      </div>
      {concern.remedy && <p class="judgement-remedy">{concern.remedy}</p>}
      <Unchecked verdict={verdict} />
      {selectedFacets.value.length > 0 && (
        <p class="judgement-scope">The verdict is on the whole run, whatever is selected.</p>
      )}
      <Rest concerns={verdict.concerns.slice(1)} />
    </section>
  );
}

/** What was not checked, and the command that checks the first of it. */
function Unchecked({ verdict: { unchecked, checks } }: { verdict: VerdictItem }) {
  if (!unchecked) return null;
  const next = checks.find((check) => !check.has_run);
  return (
    <div class="judgement-unchecked">
      <p>{unchecked}</p>
      {next && (
        <>
          <span class="dim">{next.question}</span>
          <Command text={next.command} />
        </>
      )}
    </div>
  );
}

function Words({ concern }: { concern: ConcernItem }) {
  return (
    <>
      {concern.fact}
      {concern.reason && `: ${concern.reason}`}.
    </>
  );
}

function Rest({ concerns }: { concerns: readonly ConcernItem[] }) {
  if (!concerns.length) return null;
  const numHidden = concerns.length - MAX_CONCERNS;
  return (
    <ul class="judgement-rest">
      {concerns.slice(0, MAX_CONCERNS).map((concern, i) => (
        <li key={i} class={`tone-${toneOf(concern.judgement)}`}>
          <ToneMark tone={toneOf(concern.judgement)} />
          <span>
            <b>{concern.label}:</b>{" "}
            {concern.view ? (
              <a href={hrefTo(concern.view)}>
                <Words concern={concern} />
              </a>
            ) : (
              <Words concern={concern} />
            )}{" "}
            <SourceLine source={concern.source} isShort />
          </span>
        </li>
      ))}
      {numHidden > 0 && <li class="dim">and {numHidden} more</li>}
    </ul>
  );
}
