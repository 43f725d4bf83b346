/** Ranks as Python formats them (`format_ranks`): `0-7`, `0-1016/8`, `3`, joined by commas. */

/** Whether the ranks include this rank; words around them, as in `ranks 0-7`, are ignored. */
export function includesRank(ranks: string, rank: number): boolean {
  const spans = ranks.matchAll(/(\d+)(?:-(\d+)(?:\/(\d+))?)?/g);
  for (const [, first, last = first, step = "1"] of spans) {
    const [low, high] = [Number(first), Number(last)];
    if (rank >= low && rank <= high && (rank - low) % Number(step) === 0) return true;
  }
  return false;
}

export function firstRank(ranks: string): string {
  return /\d+/.exec(ranks)?.[0] ?? "";
}
