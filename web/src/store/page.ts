/** The page's data. It is read once and never changes. */
import { signal } from "@preact/signals";
import type { Page } from "../page";

const FORMAT = "shardscope.page";
const SCHEMA = 6;

/** Set before anything is rendered; tests set their own. */
export const page = signal<Page>(null as unknown as Page);

/** Parses the page's JSON; error messages are shown to users. */
export function parsePage(text: string | null | undefined): Page {
  if (!text) throw new Error('This file holds no data: it has no element with id="page".');
  const parsed = JSON.parse(text) as Page;
  if (parsed.format !== FORMAT || parsed.schema !== SCHEMA) {
    throw new Error(
      `This file is ${parsed.format} ${parsed.schema}, but its script reads ${FORMAT} ${SCHEMA}. ` +
        "Create it again with your version of shardscope.",
    );
  }
  return parsed;
}
