/**
 * Names that can be selected: those of collectives, at the positions that their columns refer to,
 * then those that only other views have. A page may have no collectives at all.
 */
import { computed } from "@preact/signals";
import { page } from "./page";

export interface KnownNames {
  readonly axis: readonly string[];
  readonly kind: readonly string[];
  readonly phase: readonly string[];
  readonly cause: readonly string[];
  readonly dtype: readonly string[];
}

export const knownNames = computed<KnownNames>(() => {
  const { communication, memory, proof, run, sharding, comparison } = page.value;
  const inserted = proof?.parallel.flatMap((item) => item.inserted) ?? [];
  const fallbacks = proof?.parallel.flatMap((item) => item.fallbacks) ?? [];
  const tables = [...(proof?.parity ?? []), ...(proof?.parallel ?? [])].map((item) => item.tensors);
  const divergences = proof?.parity.flatMap((item) => item.divergences) ?? [];
  const changes = comparison?.changes ?? [];
  return {
    axis: join(
      communication?.axes,
      run.mesh.map(({ name }) => name),
      sharding?.drawings.flatMap(({ axes }) => axes),
      [...inserted, ...fallbacks, ...changes].map(({ axis }) => axis),
    ),
    kind: join(
      communication?.kinds,
      [...inserted, ...changes].map(({ kind }) => kind),
    ),
    phase: join(
      communication?.phases,
      memory.flatMap(({ allocations }) => allocations?.phases ?? []),
      tables.flatMap(({ phase }) => phase),
      [...inserted, ...divergences, ...changes].map(({ phase }) => phase),
    ),
    cause: join(communication?.causes),
    dtype: join(
      communication?.dtypes,
      sharding?.parameters.dtype,
      tables.flatMap(({ dtype }) => dtype),
    ),
  };
});

/** The first list as it is, and other names after it. */
function join(
  first: readonly string[] = [],
  ...others: readonly (readonly string[] | undefined)[]
): readonly string[] {
  const more = others.flatMap((names) => names ?? []).filter(Boolean);
  return [...first, ...new Set(more.filter((name) => !first.includes(name)))];
}
