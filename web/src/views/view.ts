/** What the shell needs to know about a view. Each file of this folder exports one as `view`. */
import type { ComponentType } from "preact";
import type { Page } from "../page";

/** Parameters of a view's address with the values that they can have, or their form. */
export type ViewParams = Readonly<Record<string, readonly string[] | RegExp>>;

export interface View {
  readonly id: string; // its address: #/id
  readonly title: string; // of its tab
  readonly hasData: (page: Page) => boolean;
  readonly empty: string; // the sentence shown without data
  readonly command?: string; // a command that records its data
  readonly params?: (page: Page) => ViewParams; // of its address, beside those of all views
  readonly Component: ComponentType;
}
