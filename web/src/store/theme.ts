/** Light or dark: the reader's system decides, and a click, kept in the address, overrules it. */
import { computed, effect, signal } from "@preact/signals";
import { route, setParam } from "./route";

export type Theme = "light" | "dark";

const DARK = "(prefers-color-scheme: dark)";

const system = signal<Theme>("light");

export const theme = computed<Theme>(() => {
  const chosen = route.value.params.theme;
  return chosen === "light" || chosen === "dark" ? chosen : system.value;
});

export function toggleTheme(): void {
  const other = theme.value === "dark" ? "light" : "dark";
  setParam("theme", other === system.value ? null : other);
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
