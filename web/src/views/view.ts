/** What the shell knows of a view. Each file of this folder exports one as `view`. */
import type { ComponentType } from "preact";
import type { Page } from "../page";

export interface View {
  readonly id: string; // its address: #/id
  readonly title: string; // of its tab
  readonly hasData: (page: Page) => boolean;
  readonly empty: string; // a sentence for when it has none
  readonly command?: string; // that would record some
  readonly Component: ComponentType;
}
