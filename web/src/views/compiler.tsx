/** Compiled functions: their graphs and graph breaks, and diagnoses of wrong results. */
import "./compiler.css";
import type { DiagnosisItem } from "../page";
import { Empty } from "../parts/empty_message";
import { Unfollowed } from "../parts/unfollowed";
import { pluralize } from "../parts/units";
import { isInSelection } from "../store/modules";
import { page } from "../store/page";
import { type Facet, isRankSelected, isSourceSelected, selection } from "../store/selection";
import { Diagnosis } from "./compiler/diagnosis";
import { Explanation } from "./compiler/explanation";
import type { View } from "./view";

/** What a diagnosis is filtered by: the rank, and where its failing ops are, if any were found. */
const FOLLOWED: readonly Facet[] = ["module", "line", "rank"];

function Compiler() {
  const { diagnoses, explanations } = page.value.compiler!;
  const shown = diagnoses.filter(isDiagnosisSelected);
  const numHidden = diagnoses.length - shown.length;
  const ofRank = explanations.filter(({ ranks }) => isRankSelected(ranks));
  return (
    <>
      {diagnoses.length > 0 && <Unfollowed what="Diagnoses" follows={FOLLOWED} />}
      {numHidden > 0 && (
        <p class="compiler-hidden">
          {`${pluralize(numHidden, "diagnosis", "diagnoses")} of other ranks, modules or lines ${numHidden === 1 ? "is" : "are"} not shown.`}
        </p>
      )}
      {shown.map((item) => (
        <Diagnosis key={`d${diagnoses.indexOf(item)}`} item={item} />
      ))}
      {ofRank.map((item) => (
        <Explanation key={`e${explanations.indexOf(item)}`} item={item} />
      ))}
      {explanations.length > 0 && !ofRank.length && (
        <Empty>{`Rank ${selection.value.rank} was not explained.`}</Empty>
      )}
    </>
  );
}

/** A diagnosis that found no failing op is about the whole function. */
function isDiagnosisSelected({ rank, suspects }: DiagnosisItem): boolean {
  if (selection.value.rank >= 0 && selection.value.rank !== rank) return false;
  const located = suspects.filter(({ module, source }) => module >= 0 || source >= 0);
  return (
    !located.length ||
    located.some(({ module, source }) => isInSelection(module) && isSourceSelected(source))
  );
}

export const view: View = {
  id: "compiler",
  title: "Compiler",
  hasData: ({ compiler }) =>
    compiler !== null && compiler.diagnoses.length + compiler.explanations.length > 0,
  empty: "Compilation was not recorded.",
  command: "shardscope explain TARGET -o recording.json",
  params: ({ compiler }) => ({
    ops: ["lines", "table"],
    frame: (compiler?.explanations ?? []).flatMap(({ guards }) =>
      guards.map(({ compile_id }) => compile_id),
    ),
  }),
  Component: Compiler,
};
