/** Saves files from the page, without a request: blobs, and links that the browser downloads. */
import { page } from "../store/page";

const MAX_NAME = 60;

/** `llama.memory.csv`: named after the report's file, or else after its title. */
export function nameFile(part: string, ending: string): string {
  return [nameReport(), toName(part)].filter(Boolean).join(".") + ending;
}

export function nameReport(): string {
  const file = /([^/\\]+)\.html?$/.exec(decodePath(location.pathname))?.[1];
  return toName(file ?? page.value.run.title) || "shardscope";
}

function decodePath(path: string): string {
  try {
    return decodeURIComponent(path);
  } catch {
    return "";
  }
}

/** Letters, digits, dots, dashes and underscores; everything else becomes a dash. */
export function toName(text: string): string {
  return text
    .replace(/[^\p{L}\p{N}._-]+/gu, "-")
    .replace(/^[-.]+|[-.]+$/g, "")
    .slice(0, MAX_NAME);
}

export function saveBlob(name: string, blob: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  // The download has begun by then, also in browsers that begin it later than the click.
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function saveText(name: string, text: string, type: string): void {
  saveBlob(name, new Blob([text], { type: `${type};charset=utf-8` }));
}
