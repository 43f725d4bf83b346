/** A word in the colour of its meaning; a shape shows the same without colour. */

export type Tone = "bad" | "warn" | "info" | "good" | "quiet";

const TONES: Readonly<Record<string, Tone>> = {
  // severities
  error: "bad",
  warning: "warn",
  info: "info",
  // judgements on a run
  fails: "bad",
  suspect: "warn",
  costly: "warn",
  fine: "good",
  // verdicts on ops
  sharded: "good",
  redistributed: "info",
  decomposed: "info",
  replicated: "warn",
  missing: "bad",
  wrong: "bad",
  // agreement of tensors
  equal: "good",
  close: "good",
  rounded: "good",
  random: "good",
  differs: "bad",
  ranks_disagree: "bad",
  nonfinite: "bad",
  reshaped: "bad",
  extra: "warn",
  // changes
  added: "info",
  gone: "quiet",
  changed: "warn",
};

const SHAPES: Readonly<Record<Tone, string>> = {
  bad: "M8 1.5 14.5 8 8 14.5 1.5 8Z",
  warn: "M8 2 15 14H1Z",
  info: "M2.5 2.5h11v11h-11Z",
  good: "M8 2a6 6 0 1 1 0 12A6 6 0 0 1 8 2Z",
  quiet: "M2 7h12v2H2Z",
};

/** The tone of a severity, a verdict or an agreement. */
export function toneOf(word: string): Tone {
  return TONES[word.replaceAll(" ", "_")] ?? "quiet";
}

export function ToneMark({ tone }: { tone: Tone }) {
  return (
    <svg class={`tone-mark tone-${tone}`} viewBox="0 0 16 16" aria-hidden="true">
      <path d={SHAPES[tone]} />
    </svg>
  );
}

export function Badge({ word, tone = toneOf(word) }: { word: string; tone?: Tone }) {
  return (
    <span class={`badge tone-${tone}`}>
      <ToneMark tone={tone} />
      {word.replaceAll("_", " ")}
    </span>
  );
}
