/** Compiled functions: their graphs and graph breaks, and diagnoses of wrong results. */
import "./compiler.css";
import { page } from "../store/page";
import { isRankSelected } from "../store/selection";
import { Diagnosis } from "./compiler/diagnosis";
import { Explanation } from "./compiler/explanation";
import type { View } from "./view";

function Compiler() {
  const { diagnoses, explanations } = page.value.compiler!;
  return (
    <>
      {diagnoses.map((item, i) => (
        <Diagnosis key={`d${i}`} item={item} />
      ))}
      {explanations.map(
        (item, i) => isRankSelected(item.ranks) && <Explanation key={`e${i}`} item={item} />,
      )}
    </>
  );
}

export const view: View = {
  id: "compiler",
  title: "Compiler",
  hasData: ({ compiler }) =>
    compiler !== null && compiler.diagnoses.length + compiler.explanations.length > 0,
  empty: "Compilation was not recorded.",
  command: "shardscope explain TARGET -o recording.json",
  Component: Compiler,
};
