/** Made by page_types.py from the page's JSON Schema; do not edit. */

/**
 * How much of one kind changed, and its totals.
 */
export interface AreaSum {
  name: string;
  before: string;
  after: string;
  num_added: number;
  num_gone: number;
  num_changed: number;
}

/**
 * One axis of a device mesh.
 */
export interface Axis {
  name: string;
  size: number;
}

/**
 * A line that breaks graphs.
 */
export interface BreakRow {
  source: number;
  num_events: number;
  reason: string;
  explanation: string;
  break_id: string;
  hints: readonly string[];
  fix: string;
}

/**
 * Collectives in columns, by rank and then in the order in which it issued them.
 *
 * `start_ns` is empty where the run's clock was not recorded, as in a simulation.
 */
export interface Calls {
  rank: readonly number[];
  order: readonly number[];
  group: readonly number[];
  kind: readonly number[];
  axis: readonly number[];
  phase: readonly number[];
  owner: readonly number[];
  trigger: readonly number[];
  cause: readonly number[];
  source: readonly number[];
  dtype: readonly number[];
  input_bytes: readonly number[];
  output_bytes: readonly number[];
  wire_bytes: readonly number[];
  start_ns: readonly number[];
}

/**
 * A cause and its collectives; the most expensive come first.
 */
export interface CauseRow {
  words: number;
  what: string;
  count: number;
  wire_bytes: number;
  is_implicit: boolean;
  source: number;
  modules: readonly number[];
}

/**
 * Something that is not the same; `before` and `after` are for people, `delta` sorts.
 */
export interface ChangeRow {
  area: number;
  status: string;
  module: number;
  path: string;
  what: string;
  before: string;
  after: string;
  delta: number;
  is_worse: boolean | null;
  repeat: number;
  because: string;
}

/**
 * All collectives and their causes. Lists of names come first; all else points into them.
 */
export interface Communication {
  axes: readonly string[];
  kinds: readonly string[];
  phases: readonly string[];
  causes: readonly string[];
  dtypes: readonly string[];
  groups: readonly GroupRow[];
  ranks: readonly RankRow[];
  sums: readonly Sum[];
  reasons: readonly CauseRow[];
  calls: Calls;
  spans: Spans;
  timings: readonly Timing[];
  matrix: Matrix | null;
  matrix_note: string;
  left_out: string;
  scope: string;
  clock: string;
}

/**
 * What changed from one recording to the next.
 */
export interface Comparison {
  before: string;
  after: string;
  areas: readonly AreaSum[];
  changes: readonly ChangeRow[];
  notes: readonly string[];
  left_out: number;
}

/**
 * Explanations and diagnoses.
 */
export interface Compiler {
  explanations: readonly ExplanationItem[];
  diagnoses: readonly DiagnosisItem[];
}

/**
 * Whether a compiled function is right.
 */
export interface DiagnosisItem {
  target: string;
  backend: string;
  rank: number;
  condition: string;
  is_bad: boolean;
  fact: string;
  stage: string;
  part: string;
  where: string;
  num_queries: number;
  suspects: readonly SuspectRow[];
  is_minimal: boolean;
  deviation: string;
  error: string;
  repro: string;
  script: string;
  is_verified: boolean;
  passing: string;
  notes: readonly string[];
}

/**
 * Where the two versions part.
 */
export interface DivergenceItem {
  module: number;
  path: string;
  phase: string;
  suspect: string;
  detail: string;
  op: string;
  remedy: string;
  source: number;
}

/**
 * The layout of tensors of one shape and placement; `pieces` is empty if there are too many.
 */
export interface Drawing {
  shape: readonly number[];
  placements: readonly string[];
  axes: readonly string[];
  words: string;
  horizontal: string;
  vertical: string;
  pieces: readonly Piece[];
  note: string;
}

/**
 * What torch.compile made of one function; ranks that agree share one.
 */
export interface ExplanationItem {
  target: string;
  ranks: string;
  words: string;
  num_break_events: number;
  graphs: readonly GraphItem[];
  break_sites: readonly BreakRow[];
  recompiles: readonly RecompileRow[];
  skipped_frames: readonly SkippedRow[];
  stages: readonly StageRow[];
  failure: string;
}

/**
 * A figure of the overview; `view` is where it leads.
 */
export interface Fact {
  label: string;
  value: string;
  note: string;
  view: string;
}

/**
 * Ops that could not run on pieces, alike but for their layer.
 */
export interface FallbackRow {
  op: string;
  kind: string;
  axis: string;
  count: number;
  size_bytes: number;
  placements: string;
  remedy: string;
  module: number;
  source: number;
}

/**
 * A finding; the worst come first.
 */
export interface FindingItem {
  rule: string;
  severity: string;
  subject: string;
  fact: string;
  remedy: string;
  ranks: string;
  count: number;
  module: number;
  source: number;
}

/**
 * Something that was not understood.
 */
export interface GapItem {
  place: string;
  fact: string;
  rank: number | null;
  is_loss: boolean;
}

/**
 * One graph, its ops in columns.
 */
export interface GraphItem {
  index: number;
  function: string;
  end: string;
  num_inputs: number;
  num_outputs: number;
  num_ops: number;
  fingerprint: string;
  compile_id: string;
  is_recompile: boolean;
  break_site: number;
  source: number;
  op: readonly string[];
  kind: readonly string[];
  result: readonly string[];
  module: readonly number[];
  line: readonly number[];
  left_out: number;
}

/**
 * A process group.
 */
export interface GroupRow {
  name: string;
  ranks: string;
  num_ranks: number;
  axis: string;
  backend: string;
}

/**
 * What one module held of one kind at the peak; the most comes first.
 */
export interface HeldRow {
  kind: number;
  module: number;
  num_bytes: number;
}

/**
 * Collectives that were put in, alike but for their layer.
 */
export interface InsertedRow {
  what: string;
  phase: string;
  count: number;
  size_bytes: number;
  cause: string;
  module: number;
  source: number;
}

/**
 * A tensor whose layout was asked for by itself.
 */
export interface LayoutRow {
  name: string;
  drawing: number;
}

/**
 * All ops at one level; `counts` has a number for each of `verdicts`.
 */
export interface LevelCoverage {
  level: string;
  mesh: string;
  has_plan: boolean;
  verdicts: readonly string[];
  counts: readonly number[];
  ops: readonly OpRow[];
}

/**
 * Bytes from rank to rank if groups run rings; `sender` and `receiver` are positions.
 */
export interface Matrix {
  ranks: readonly number[];
  sender: readonly number[];
  receiver: readonly number[];
  num_bytes: readonly number[];
}

/**
 * A step's memory on ranks that held the same; columns have one entry for each sample.
 *
 * Where there were more moments than a screen has columns, the highest of each stretch is kept,
 * and the peak always. The curve of the ranks that need most comes first; of others there are
 * fewer moments, and of what they held at the peak only the largest.
 */
export interface MemoryCurve {
  ranks: string;
  kinds: readonly string[];
  order: readonly number[];
  num_bytes: readonly (readonly number[])[];
  module: readonly number[];
  phases: readonly PhaseStretch[];
  peak: number;
  peak_bytes: number;
  peak_phase: string;
  peak_module: number;
  at_peak: readonly HeldRow[];
  first_peak_bytes: number | null;
  reserved_bytes: number | null;
  needed_bytes: number | null;
  device_bytes: number | null;
  room: string;
  caveat: string;
}

/**
 * All modules in the order of a walk from the root, in columns; figures are of one rank.
 *
 * Where ranks differ they are the busiest rank's, and `is_uneven` says so. A module that is like
 * an earlier sibling but for its number has that one's position in `alike`, others their own;
 * folding leaves out whatever is not its own, with all below it. Columns of phases are in the
 * order of `phases`. `own` figures leave out children, `total` figures do not. `recorded` names
 * the columns whose figures were recorded: zeros of the others mean nothing.
 */
export interface Modules {
  recorded: readonly string[];
  phases: readonly string[];
  path: readonly string[];
  label: readonly string[];
  type: readonly string[];
  parent: readonly number[];
  end: readonly number[];
  alike: readonly number[];
  repeat: readonly number[];
  what: readonly string[];
  is_uneven: readonly boolean[];
  own_count: readonly (readonly number[])[];
  total_count: readonly (readonly number[])[];
  total_input_bytes: readonly number[];
  own_wire_bytes: readonly number[];
  total_wire_bytes: readonly (readonly number[])[];
  total_parameters: readonly number[];
  total_parameter_bytes: readonly number[];
  total_local_bytes: readonly number[];
  total_peak_bytes: readonly number[];
  marks: readonly string[];
  num_findings: readonly number[];
}

/**
 * One op; the worst come first.
 */
export interface OpRow {
  op: string;
  schema: string;
  verdict: string;
  num_forward: number;
  num_backward: number;
  flops: number | null;
  moved_bytes: number;
  detail: string;
  remedy: string;
  moves: readonly string[];
  shardings: readonly ShardingRow[];
  modules: readonly number[];
  sources: readonly number[];
}

/**
 * All that one page shows. A view that has nothing to show is None or empty.
 */
export interface Page {
  run: RunFacts;
  facts: readonly Fact[];
  findings: readonly FindingItem[];
  gaps: readonly GapItem[];
  sources: Sources;
  modules: Modules;
  communication: Communication | null;
  sharding: ShardingTable | null;
  coverage: readonly LevelCoverage[];
  compiler: Compiler | null;
  memory: readonly MemoryCurve[];
  proof: Proof | null;
  comparison: Comparison | null;
  format: "shardscope.page";
  schema: 2;
}

/**
 * A program that was cut for a mesh.
 */
export interface ParallelItem {
  program: string;
  mesh: string;
  words: string;
  is_fine: boolean;
  inserted: readonly InsertedRow[];
  fallbacks: readonly FallbackRow[];
  tensors: VerdictTable;
}

/**
 * Parameters and buffers in columns.
 */
export interface Parameters {
  module: readonly number[];
  name: readonly string[];
  shape: readonly string[];
  local_shape: readonly string[];
  dtype: readonly string[];
  drawing: readonly number[];
  placement: readonly string[];
  global_bytes: readonly (number | null)[];
  local_bytes: readonly (number | null)[];
  is_trainable: readonly boolean[];
  is_buffer: readonly boolean[];
  rule: readonly string[];
  fsdp_group: readonly string[];
  alias_group: readonly string[];
  live_name: readonly string[];
  checkpoint_key: readonly string[];
  ranks: readonly string[];
  flags: readonly string[];
}

/**
 * A comparison with the single device.
 */
export interface ParityItem {
  mesh: string;
  words: string;
  is_fine: boolean;
  tensors: VerdictTable;
  divergences: readonly DivergenceItem[];
}

/**
 * From which moment to which (both included) a phase lasted, as positions of samples.
 */
export interface PhaseStretch {
  phase: string;
  first: number;
  last: number;
}

/**
 * A part of a tensor, as a rectangle in shares (0 to 1) of its last two cut dims.
 */
export interface Piece {
  left: number;
  top: number;
  width: number;
  height: number;
  ranks: string;
  indices: string;
  color: number;
}

/**
 * All comparisons and all programs that were cut.
 */
export interface Proof {
  parity: readonly ParityItem[];
  parallel: readonly ParallelItem[];
}

/**
 * Ranks that issued the same.
 */
export interface RankRow {
  ranks: string;
  example: number;
  num_ranks: number;
  count: number;
  input_bytes: number;
  wire_bytes: number;
}

/**
 * A function that was compiled again.
 */
export interface RecompileRow {
  function: string;
  number: number;
  guard: string;
  description: string;
  source: number;
}

/**
 * What ran.
 */
export interface RunFacts {
  title: string;
  mesh: readonly Axis[];
  world_size: number;
  ranks: string;
  reality: string;
  torch_version: string;
  shardscope_version: string;
  command: string;
  instruments: readonly string[];
  checks: string;
  no_gaps: string;
  scope: string;
  num_forwards: number | null;
}

/**
 * One way to lay out an op's inputs.
 */
export interface ShardingRow {
  inputs: string;
  verdict: string;
  outputs: string;
  num_bytes: number | null;
  detail: string;
}

/**
 * All parameters, and a drawing for each of their layouts.
 */
export interface ShardingTable {
  parameters: Parameters;
  drawings: readonly Drawing[];
  global_bytes: number | null;
  local_bytes: number | null;
  replicated_bytes: number | null;
  layouts: readonly LayoutRow[];
}

/**
 * A function left to Python.
 */
export interface SkippedRow {
  function: string;
  reason: string;
  is_rest: boolean;
  source: number;
}

/**
 * Lines of the user's program, in columns.
 */
export interface Sources {
  file: readonly string[];
  line: readonly number[];
  function: readonly string[];
  text: readonly string[];
}

/**
 * Named stretches of time in columns.
 */
export interface Spans {
  rank: readonly number[];
  name: readonly number[];
  start_ns: readonly number[];
  duration_ns: readonly number[];
  depth: readonly number[];
  device: readonly number[];
  names: readonly string[];
}

/**
 * Time that a stage took.
 */
export interface StageRow {
  stage: string;
  num_calls: number;
  total_ns: number | null;
}

/**
 * Collectives of the busiest rank of one kind along one axis in one phase.
 */
export interface Sum {
  axis: number;
  kind: number;
  phase: number;
  count: number;
  input_bytes: number;
  wire_bytes: number;
}

/**
 * An op to blame.
 */
export interface SuspectRow {
  op: string;
  module: number;
  source: number;
}

/**
 * What the spans of one name add up to by one clock, on the rank that took longest.
 */
export interface Timing {
  name: string;
  device: string;
  slowest: number;
  num_ranks: number;
  count: number;
  total_ns: number;
  self_ns: number;
  max_ns: number;
}

/**
 * Tensors that were compared, in columns; those that differ come first.
 */
export interface VerdictTable {
  name: readonly string[];
  kind: readonly string[];
  agreement: readonly string[];
  is_fine: readonly boolean[];
  error: readonly (number | null)[];
  noise: readonly (number | null)[];
  suspect: readonly string[];
  detail: readonly string[];
  ranks: readonly string[];
}
