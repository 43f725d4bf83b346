/** The key figures of a run as tiles, in rows of equal length where possible. */
import { useRef } from "preact/hooks";
import type { Fact } from "../../page";
import { countColumns } from "../../parts/tile_columns";
import { formatBytes, formatNumber } from "../../parts/units";
import { useSize } from "../../parts/use_size";
import { hrefTo } from "../../store/route";
import { selectedFacets } from "../../store/selection";
import { selectedTraffic } from "../../store/traffic";

export function Facts({ facts }: { facts: readonly Fact[] }) {
  const frame = useRef<HTMLElement>(null);
  const { width } = useSize(frame);
  const basis = `${100 / countColumns(facts.length, width)}%`;
  return (
    <section class="facts" aria-label="figures" ref={frame}>
      {facts.map((fact) => (
        <FactTile key={fact.label} fact={fact} basis={basis} />
      ))}
    </section>
  );
}

/** The figure of what is selected; empty without a selection, and for figures that do not follow it. */
function formatSelected({ measure }: Fact): string {
  if (!selectedFacets.value.length) return "";
  if (measure === "count") return formatNumber(selectedTraffic.value.count);
  return measure === "wire_bytes" ? formatBytes(selectedTraffic.value.wire_bytes) : "";
}

function FactTile({ fact, basis }: { fact: Fact; basis: string }) {
  const style = { flexBasis: basis };
  const selected = formatSelected(fact);
  const isOfRun = !selected && selectedFacets.value.length > 0;
  const content = (
    <>
      <span class="fact-label">{fact.label}</span>
      <span class="fact-value">{selected || fact.value}</span>
      <span class={selected ? "fact-note fact-scope" : "fact-note"}>
        {selected ? `of ${fact.value}: what is selected` : fact.note}
      </span>
      {isOfRun && <span class="fact-note fact-scope">of the whole run</span>}
    </>
  );
  if (!fact.view) {
    return (
      <div class="fact" style={style}>
        {content}
      </div>
    );
  }
  return (
    <a class="fact" style={style} href={hrefTo(fact.view)}>
      {content}
    </a>
  );
}
