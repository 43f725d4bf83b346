/** The module tree as a table: a row for each module, with the figures that were recorded. */
import type { Modules } from "../page";
import type { Value } from "../parts/table_rows";

export function listModules(modules: Modules): Value[][] {
  const figures: readonly (readonly [string, string, readonly number[]])[] = [
    ["parameters", "parameters", modules.total_parameters],
    ["parameters", "parameter_bytes", modules.total_parameter_bytes],
    ["local", "local_bytes", modules.total_local_bytes],
    ["peak", "peak_bytes", modules.total_peak_bytes],
    ["findings", "findings", modules.num_findings],
  ];
  // Zeros of what was not recorded mean nothing.
  const recorded = figures.filter(([name]) => modules.recorded.includes(name));
  return [
    ["module", "type", "marks", ...recorded.map(([, title]) => title)],
    ...modules.path.map((path, i): Value[] => [
      path || modules.label[i]!,
      modules.type[i]!,
      modules.marks[i]!,
      ...recorded.map(([, , column]) => column[i]!),
    ]),
  ];
}
