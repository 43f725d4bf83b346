/** What the page sums of the recording that it is compared with. */
import type { EarlierRecording, Modules } from "../page";

/** Figures of its modules, in the order of `EarlierData.modules`; null if only names are known. */
export type ModuleSizes = Pick<
  Modules,
  "recorded" | "total_parameters" | "total_local_bytes" | "total_peak_bytes"
>;

export interface EarlierData extends EarlierRecording {
  readonly sizes: ModuleSizes | null;
}
