/** Takes a report or a recording that is dropped onto the page, or chosen, and compares with it. */
import { signal } from "@preact/signals";
import { useLayoutEffect } from "preact/hooks";
import { compareWithFile, dropError } from "../store/earlier";

const isDragging = signal(false);

function hasFiles(event: DragEvent): boolean {
  return event.dataTransfer?.types.includes("Files") ?? false;
}

function handleDragOver(event: DragEvent): void {
  if (!hasFiles(event)) return;
  event.preventDefault(); // else the browser would open the file
  isDragging.value = true;
}

function handleDragLeave(event: DragEvent): void {
  if (event.relatedTarget === null) isDragging.value = false;
}

function handleDrop(event: DragEvent): void {
  if (!hasFiles(event)) return;
  event.preventDefault();
  isDragging.value = false;
  const [file, ...more] = event.dataTransfer!.files;
  if (more.length) {
    dropError.value = "Several files were dropped: drop one report or recording.";
  } else if (file) void compareWithFile(file);
}

export function DropZone() {
  useLayoutEffect(() => {
    const handlers = { dragover: handleDragOver, dragleave: handleDragLeave, drop: handleDrop };
    for (const [name, handler] of Object.entries(handlers)) {
      document.addEventListener(name, handler as EventListener);
    }
    return () => {
      for (const [name, handler] of Object.entries(handlers)) {
        document.removeEventListener(name, handler as EventListener);
      }
    };
  }, []);
  return (
    <>
      {isDragging.value && (
        <div class="drop-zone">
          <p>Drop a report or a recording to compare this page with it</p>
        </div>
      )}
      {dropError.value && (
        <div class="drop-error" role="alert">
          <span>{dropError.value}</span>
          <button
            type="button"
            class="close"
            aria-label="close"
            onClick={() => {
              dropError.value = "";
            }}
          >
            ×
          </button>
        </div>
      )}
    </>
  );
}

/** The same without dragging, for the keyboard. */
export function FileChoice() {
  return (
    <label class="file-choice">
      Choose
      <input
        type="file"
        class="visually-hidden"
        accept=".html,.json,.gz"
        aria-label="report or recording to compare with"
        onChange={(event) => {
          const file = event.currentTarget.files?.[0];
          if (file) void compareWithFile(file);
          event.currentTarget.value = "";
        }}
      />
    </label>
  );
}
