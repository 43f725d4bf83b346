/** Light or dark theme: the system's setting, unless the address has another. */
import { computed, effect, signal } from "@preact/signals";
import { route, setParam } from "./route";

export type Theme = "light" | "dark";

const DARK = "(prefers-color-scheme: dark)";

const system = signal<Theme>("light");

export const theme = computed<Theme>(() => {
  const requested = route.value.params.theme;
  return requested === "light" || requested === "dark" ? requested : system.value;
});

export function toggleTheme(): void {
  const otherTheme = theme.value === "dark" ? "light" : "dark";
  setParam("theme", otherTheme === system.value ? null : otherTheme, { isReplacing: true });
}

export function followTheme(): void {
  const query = matchMedia(DARK);
  const read = (): void => {
    system.value = query.matches ? "dark" : "light";
  };
  read();
  query.addEventListener("change", read);
  effect(() => {
    document.documentElement.dataset.theme = theme.value;
  });
}
