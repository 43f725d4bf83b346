// @vitest-environment happy-dom
import { render } from "preact";
import { expect, test } from "vitest";
import { makePage } from "../../store/empty_page";
import { page } from "../../store/page";
import { ModuleCard } from "./module_card";

function renderFigures(recorded: readonly string[]): string {
  page.value = makePage({
    run: { checks: "checked by: trace" },
    modules: {
      recorded,
      path: ["net"],
      label: ["net"],
      type: ["Net"],
      parent: [-1],
      marks: [""],
      num_findings: [0],
      total_parameters: [0],
      total_local_bytes: [0],
      total_peak_bytes: [0],
    },
    coverage: [],
    memory: [],
    communication: null,
    sharding: null,
    compiler: null,
    proof: null,
    terms: [],
  });
  const root = document.createElement("div");
  render(<ModuleCard module={0} />, root);
  return [...root.querySelectorAll(".card-figures > div")]
    .map(
      (entry) =>
        `${entry.querySelector("dt")!.textContent}: ${entry.querySelector("dd")!.textContent}`,
    )
    .join("; ");
}

test("figures that were not recorded are not shown as zero", () => {
  expect(renderFigures(["wire", "findings"])).toBe(
    "bytes sent: 0 B; collectives: 0; parameters: not recorded; held: not recorded; peak memory: not recorded; findings: 0; own collectives: none",
  );
  expect(renderFigures(["parameters", "local", "peak"])).toBe(
    "bytes sent: not recorded; collectives: not recorded; parameters: 0; held: 0 B; peak memory: 0 B; findings: not recorded; own collectives: not recorded",
  );
});
