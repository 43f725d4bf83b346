/** A page without data, of which tests fill what they need. */
import type { Page } from "../page";

export function makePage(filled: Filled): Page {
  const modules = { ...NO_MODULES, ...filled.modules };
  const run = { ...EMPTY.run, ...filled.run };
  return { ...EMPTY, ...filled, run, modules } as unknown as Page;
}

interface Filled {
  readonly run?: object;
  readonly modules?: object;
  readonly [field: string]: unknown;
}

const NO_MODULES = {
  recorded: [],
  path: [],
  label: [],
  type: [],
  parent: [],
  end: [],
  first_identical: [],
  repeat: [],
  total_parameters: [],
  total_parameter_bytes: [],
  total_local_bytes: [],
  total_peak_bytes: [],
  marks: [],
  num_findings: [],
  own_peak: { kinds: [], module: [], kind: [], num_bytes: [] },
  earlier: null,
};

const EMPTY = {
  run: { world_size: 1024, title: "A recording", checks: "", mesh: [] },
  sources: { file: [], line: [], function: [], text: [] },
  communication: null,
  sharding: null,
  coverage: [],
  compiler: null,
  memory: [],
  proof: null,
  comparison: null,
  figures: [],
  earlier_figures: [],
  terms: [],
};
