/**
 * Whether the parallel program computes the same results, the collectives that were inserted, and
 * whether its ranks would wait for each other.
 */
import "./proof.css";
import type { DivergenceItem, ParallelItem, ParityItem, TensorTable } from "../page";
import { Badge } from "../parts/badge";
import { Choices } from "../parts/choices";
import { ModuleLink } from "../parts/module_link";
import { Panel } from "../parts/panel";
import { SourceLine } from "../parts/source_line";
import { Unfollowed } from "../parts/unfollowed";
import { formatNumber, pluralize } from "../parts/units";
import { page } from "../store/page";
import { param, setParam } from "../store/route";
import { listUnfollowed, selectedFacets } from "../store/selection";
import { CheckedRanks } from "./proof/checked_ranks";
import { ComparedTensors } from "./proof/compared_tensors";
import { Fallbacks, Inserted } from "./proof/inserted";
import { countDiffering, FOLLOWED, isDivergenceSelected } from "./proof/selected_rows";
import type { View } from "./view";

function Proof() {
  const { parity, parallel, checks } = page.value.proof!;
  return (
    <>
      {parity.map((item, i) => (
        <Parity key={`p${i}`} item={item} />
      ))}
      {parallel.map((item, i) => (
        <Parallel key={`c${i}`} item={item} />
      ))}
      {checks.map((item, i) => (
        <CheckedRanks key={`r${i}`} item={item} />
      ))}
    </>
  );
}

function WhichTensors() {
  const value = param("only") ?? "all";
  return (
    <Choices
      label="which tensors"
      choices={[
        { id: "all", title: "All" },
        { id: "bad", title: "Those that differ" },
      ]}
      value={value}
      onChange={(id) => setParam("only", id === "all" ? null : id)}
    />
  );
}

function Summary({ isFine, summary }: { isFine: boolean; summary: string }) {
  return (
    <p class={isFine ? "proof-words" : "proof-words proof-wrong"}>
      <Badge word={isFine ? "the same" : "differs"} tone={isFine ? "good" : "bad"} />
      <span>{summary}</span>
    </p>
  );
}

/** The same of the selected tensors; nothing if no selected facet concerns tensors. */
function SelectedTensors({ tensors }: { tensors: TensorTable }) {
  const facets = selectedFacets.value;
  if (!facets.length || listUnfollowed(FOLLOWED.tensors).length === facets.length) return null;
  const { all, bad } = countDiffering(tensors);
  return (
    <p class="proof-selected" role="status">
      In what is selected,{" "}
      <b>
        {all
          ? `${formatNumber(bad)} of ${pluralize(all, "tensor")} ${bad === 1 ? "differs" : "differ"}`
          : "no tensor was compared"}
      </b>
      .
    </p>
  );
}

function Parity({ item }: { item: ParityItem }) {
  return (
    <Panel
      title="Does the parallel model compute the same?"
      note={`on ${item.mesh}`}
      controls={<WhichTensors />}
    >
      <Summary isFine={item.is_fine} summary={item.summary} />
      <SelectedTensors tensors={item.tensors} />
      {item.divergences.length > 0 && <Divergences items={item.divergences} />}
      <Unfollowed what="Tensors" follows={FOLLOWED.tensors} />
      <ComparedTensors
        tensors={item.tensors}
        label="compared tensors"
        isBad={param("only") === "bad"}
      />
    </Panel>
  );
}

/** Where the two versions diverge, as far as it is selected. */
function Divergences({ items }: { items: readonly DivergenceItem[] }) {
  const shown = items.filter(isDivergenceSelected);
  const numHidden = items.length - shown.length;
  return (
    <>
      <Unfollowed what="Places that differ" follows={FOLLOWED.divergences} />
      {shown.length > 0 && (
        <ol class="breaks">
          {shown.map((divergence, i) => (
            <Divergence key={i} item={divergence} />
          ))}
        </ol>
      )}
      {numHidden > 0 && (
        <p class="proof-none">
          {pluralize(numHidden, "place")} where the versions first differ{" "}
          {numHidden === 1 ? "is" : "are"} not in what is selected.
        </p>
      )}
    </>
  );
}

function Divergence({ item }: { item: DivergenceItem }) {
  return (
    <li class="break">
      <div class="break-head">
        <Badge word={item.suspect} tone="bad" />
        <span>
          first differs in <ModuleLink module={item.module} text={item.path || undefined} />, in{" "}
          {item.phase}
        </span>
        {item.op && <code>{item.op}</code>}
      </div>
      <p class="wrap">{item.detail}</p>
      <SourceLine source={item.source} />
      {item.remedy && <p class="remedy">{item.remedy}</p>}
    </li>
  );
}

function Parallel({ item }: { item: ParallelItem }) {
  return (
    <Panel
      title={`${item.program}, partitioned for ${item.mesh}`}
      controls={item.tensors.name.length > 0 && <WhichTensors />}
    >
      <Summary isFine={item.is_fine} summary={item.summary} />
      {item.tensors.name.length > 0 && <SelectedTensors tensors={item.tensors} />}
      {item.fallbacks.length > 0 && <Fallbacks rows={item.fallbacks} />}
      {item.inserted.length > 0 && (
        <Inserted rows={item.inserted} label={`inserted collectives of ${item.program}`} />
      )}
      {item.tensors.name.length > 0 && (
        <section class="proof-table">
          <h3 class="detail-head">Tensors, compared with the original</h3>
          <Unfollowed what="Tensors" follows={FOLLOWED.tensors} />
          <ComparedTensors
            tensors={item.tensors}
            label={`compared tensors of ${item.program}`}
            isBad={param("only") === "bad"}
          />
        </section>
      )}
    </Panel>
  );
}

export const view: View = {
  id: "proof",
  title: "Correctness",
  hasData: ({ proof }) =>
    proof !== null && proof.parity.length + proof.parallel.length + proof.checks.length > 0,
  empty: "The parallel model was not compared with a single device.",
  command: "shardscope parity TARGET --mesh tp=2 -o recording.json",
  params: () => ({ only: ["all", "bad"] }),
  Component: Proof,
};
