/** The page that Python made. It is read once and never changes. */
import { signal } from "@preact/signals";
import type { Page } from "../page";

const FORMAT = "shardscope.page";
const SCHEMA = 2;

/** Set before anything is drawn; tests set their own. */
export const page = signal<Page>(null as unknown as Page);

/** Parse the page's JSON; the sentence of the error is shown to people. */
export function parsePage(text: string | null | undefined): Page {
  if (!text) throw new Error('This file holds no data: it has no element with id="page".');
  const found = JSON.parse(text) as Page;
  if (found.format !== FORMAT || found.schema !== SCHEMA) {
    throw new Error(
      `This file is ${found.format} ${found.schema}, but its script reads ${FORMAT} ${SCHEMA}. ` +
        "Create it again with your version of shardscope.",
    );
  }
  return found;
}
