/**
 * Keys that work in every view, and the list of them. Layout effects, because a key pressed between
 * the first drawing and the effects after it would be lost.
 */
import { signal } from "@preact/signals";
import { createRef } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import { hrefTo, navigate, parseRoute } from "../store/route";
import { toggleTheme } from "../store/theme";
import { VIEWS } from "../views";
import { clearSelection } from "./selection_bar";

export const searchInput = createRef<HTMLInputElement>();

const isHelpOpen = signal(false);

export function openKeyHelp(): void {
  isHelpOpen.value = true;
}

const KEYS: readonly [string, string][] = [
  ["/", "search: words, a module pattern (layers.*.attn) or a regular expression (/attn|mlp/)"],
  [`1 – ${VIEWS.length}`, "go to a view"],
  ["← →", "move between tabs, the cells of a row, or collapse and expand a module"],
  ["↑ ↓", "move between rows; also Page Up, Page Down, Home, End"],
  ["+ − 0", "in a timeline: zoom in, zoom out, reset; w s a d zoom and pan"],
  ["[ ]", "in a timeline: begin and end a selected range"],
  ["Backspace", "in the picture of the modules: zoom out"],
  ["Enter", "select what the row or cell names, in every view"],
  ["Space", "in the tree: fold or unfold identical layers"],
  ["Esc", "clear the selection; in the search box, clear the text"],
  ["Alt + ←", "undo the last selection, sort order or choice (the browser's back)"],
  ["t", "light or dark"],
  ["?", "this list"],
];

const ACTIONS: Readonly<Record<string, () => void>> = {
  "/": () => searchInput.current?.select(),
  "?": openKeyHelp,
  t: toggleTheme,
  Escape: clearSelection,
};

export function handleKey(event: KeyboardEvent): void {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || isHelpOpen.value)
    return;
  if ((event.target as Element | null)?.closest?.("input, textarea, select, [popover]")) return;
  const view = VIEWS[Number(event.key) - 1];
  const action = view ? () => navigate(parseRoute(hrefTo(view.id))) : ACTIONS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

export function useKeys(): void {
  useLayoutEffect(() => {
    document.addEventListener("keydown", handleKey);
    return () => document.removeEventListener("keydown", handleKey);
  }, []);
}

export function KeyHelp() {
  const dialog = useRef<HTMLDialogElement>(null);
  useLayoutEffect(() => {
    if (isHelpOpen.value) dialog.current?.showModal();
  }, [isHelpOpen.value]);
  if (!isHelpOpen.value) return null;
  const close = (): void => {
    isHelpOpen.value = false;
  };
  return (
    // biome-ignore lint/a11y/useKeyWithClickEvents: a dialog closes by Escape, and has a button
    <dialog
      ref={dialog}
      class="keys"
      aria-label="keys"
      onClose={close}
      onClick={(event) => event.target === dialog.current && close()}
    >
      <header>
        <h2>Keys</h2>
        <button type="button" class="close" aria-label="close" onClick={close}>
          ×
        </button>
      </header>
      <dl>
        {KEYS.map(([key, meaning]) => (
          <div key={key}>
            <dt>
              <kbd>{key}</kbd>
            </dt>
            <dd>{meaning}</dd>
          </div>
        ))}
      </dl>
    </dialog>
  );
}
