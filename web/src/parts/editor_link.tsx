/** Opens a source line in the user's editor; before one is chosen, asks which. */
import { signal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { chooseEditor, EDITORS, editorChoice, editorHref, resolvePath } from "../store/editor";

interface Line {
  readonly file: string;
  readonly line: number;
}

const askedLine = signal<Line | null>(null);

const PATH = "M6.5 3.5h-3v9h9v-3M9 2.5h4.5V7M13.5 2.5 7.5 8.5";

export function EditorLink({ file, line }: Line) {
  if (file.startsWith("<")) return null;
  const label = `open ${file}:${line} in an editor`;
  const href = editorHref(file, line);
  const icon = (
    <svg viewBox="0 0 16 16" aria-hidden="true">
      <path d={PATH} />
    </svg>
  );
  if (href) {
    return (
      // Other handlers on the row must not take the click for theirs.
      <a
        class="copy"
        href={href}
        aria-label={label}
        title={label}
        onClick={(event) => event.stopPropagation()}
      >
        {icon}
      </a>
    );
  }
  const ask = (event: Event): void => {
    event.stopPropagation();
    askedLine.value = { file, line };
  };
  return (
    <button type="button" class="copy" aria-label={label} title={label} onClick={ask}>
      {icon}
    </button>
  );
}

export function askForEditor(): void {
  askedLine.value = { file: "", line: 1 };
}

/** Rendered once, by the shell. */
export function EditorDialog() {
  const dialog = useRef<HTMLDialogElement>(null);
  const asked = askedLine.value;
  useLayoutEffect(() => {
    if (asked) dialog.current?.showModal();
  }, [asked]);
  if (!asked) return null;
  const close = (): void => {
    askedLine.value = null;
  };
  const { editor, root } = editorChoice.value;
  const href = asked.file ? editorHref(asked.file, asked.line) : null;
  return (
    <dialog ref={dialog} class="keys editor-dialog" aria-label="editor" onClose={close}>
      <header>
        <h2>Open source lines in</h2>
        <button type="button" class="close" aria-label="close" onClick={close}>
          ×
        </button>
      </header>
      <label>
        Editor
        <select
          value={editor}
          onChange={(event) => chooseEditor({ editor: event.currentTarget.value, root })}
        >
          <option value="">none</option>
          {EDITORS.map(({ id, title }) => (
            <option key={id} value={id}>
              {title}
            </option>
          ))}
        </select>
      </label>
      <label>
        Folder of the program
        <input
          value={root}
          placeholder="/home/me/project"
          spellcheck={false}
          onInput={(event) => chooseEditor({ editor, root: event.currentTarget.value })}
        />
      </label>
      <p class="dim">
        Recorded paths are relative to the folder in which the program ran. The choice stays in this
        browser; nothing is sent.
      </p>
      {asked.file && editor && !resolvePath(asked.file, root) && (
        <p role="status">{asked.file} is relative: enter the absolute path of its folder.</p>
      )}
      {href && (
        <p>
          <a class="module-link" href={href}>
            Open {asked.file}:{asked.line}
          </a>
        </p>
      )}
    </dialog>
  );
}
