/** Which parts of the selection a view does not follow, in a line; nothing if it follows them all. */
import { type Facet, listUnfollowed, nameFacet } from "../store/selection";

interface Props {
  readonly follows: readonly Facet[];
  readonly what?: string; // where only some figures do not: `Parameters and memory`
}

export function Unfollowed({ follows, what }: Props) {
  const facets = listUnfollowed(follows);
  if (!facets.length) return null;
  const words = what ? `${what} are not filtered by` : "Not filtered by";
  return <p class="unfollowed">{`${words} ${joinNames(facets.map(nameFacet))}.`}</p>;
}

/** `axis, kind and rank`. */
export function joinNames(names: readonly string[]): string {
  const last = names.at(-1) ?? "";
  return names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${last}` : last;
}
