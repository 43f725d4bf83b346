/** All views, in the order of their tabs. */
import { view as communication } from "./communication";
import { view as compare } from "./compare";
import { view as compiler } from "./compiler";
import { view as coverage } from "./coverage";
import { view as memory } from "./memory";
import { view as modules } from "./modules";
import { view as overview } from "./overview";
import { view as proof } from "./proof";
import { view as sharding } from "./sharding";
import type { View } from "./view";

export const VIEWS: readonly View[] = [
  overview,
  modules,
  communication,
  sharding,
  coverage,
  compiler,
  memory,
  proof,
  compare,
];

export function findView(id: string): View {
  return VIEWS.find((view) => view.id === id) ?? overview;
}
