/** The editor that source lines are opened in, and the folder that their paths are relative to. */
import { signal } from "@preact/signals";

export interface EditorChoice {
  readonly editor: string; // id of one of EDITORS; empty is none
  readonly root: string; // an absolute path; empty if not known
}

interface Editor {
  readonly id: string;
  readonly title: string;
  readonly makeHref: (path: string, line: number) => string;
}

/** Links that the editors register with the system; a path is encoded part by part. */
export const EDITORS: readonly Editor[] = [
  {
    id: "vscode",
    title: "Visual Studio Code",
    makeHref: (path, line) => `vscode://file${encodePath(path)}:${line}`,
  },
  {
    id: "cursor",
    title: "Cursor",
    makeHref: (path, line) => `cursor://file${encodePath(path)}:${line}`,
  },
  {
    id: "idea",
    title: "IntelliJ IDEA",
    makeHref: (path, line) => `idea://open?file=${encodeURIComponent(path)}&line=${line}`,
  },
  {
    id: "pycharm",
    title: "PyCharm",
    makeHref: (path, line) => `pycharm://open?file=${encodeURIComponent(path)}&line=${line}`,
  },
];

const KEY = "shardscope.editor";
const NO_CHOICE: EditorChoice = { editor: "", root: "" };

export const editorChoice = signal<EditorChoice>(readStored());

/** The stored choice; a browser may forbid storage, as in a notebook, or hold something else. */
function readStored(): EditorChoice {
  try {
    const stored: unknown = JSON.parse(localStorage.getItem(KEY) ?? "null");
    return isChoice(stored) ? { editor: stored.editor, root: stored.root } : NO_CHOICE;
  } catch {
    return NO_CHOICE;
  }
}

function isChoice(value: unknown): value is EditorChoice {
  const { editor, root } = (value ?? {}) as Record<string, unknown>;
  return typeof editor === "string" && typeof root === "string";
}

export function chooseEditor(choice: EditorChoice): void {
  editorChoice.value = choice;
  try {
    localStorage.setItem(KEY, JSON.stringify(choice));
  } catch {
    // The choice then lasts as long as the page is open.
  }
}

function encodePath(path: string): string {
  return path.split("/").map(encodeURIComponent).join("/");
}

/** An absolute path with slashes, `/C:/…` on Windows; null if the root is missing or no file is named. */
export function resolvePath(file: string, root: string): string | null {
  const path = file.replaceAll("\\", "/");
  if (!path || path.startsWith("<")) return null; // <stdin>, <string>: code without a file
  const isAbsolute = path.startsWith("/") || /^[A-Za-z]:\//.test(path);
  const base = root.replaceAll("\\", "/").replace(/\/+$/, "");
  const full = isAbsolute ? path : base && `${base}/${path}`;
  if (!full || !(full.startsWith("/") || /^[A-Za-z]:\//.test(full))) return null;
  return full.startsWith("/") ? full : `/${full}`;
}

/** The link that opens a line in the chosen editor; null if there is no editor or no absolute path. */
export function editorHref(
  file: string,
  line: number,
  { editor, root } = editorChoice.value,
): string | null {
  const path = resolvePath(file, root);
  const choice = EDITORS.find(({ id }) => id === editor);
  return path === null || !choice
    ? null
    : choice.makeHref(path, Math.max(1, Math.trunc(line) || 1));
}
