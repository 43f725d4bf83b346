/** Whether the screen is as narrow as a phone, as style sheets ask for it. */
import { signal } from "@preact/signals";

const query = globalThis.matchMedia?.("(max-width: 700px)");

export const isNarrow = signal(query?.matches ?? false);

query?.addEventListener("change", ({ matches }) => {
  isNarrow.value = matches;
});
