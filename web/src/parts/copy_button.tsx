/** A button that copies a text to the clipboard and confirms it. */
import { useState } from "preact/hooks";

export async function copyText(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

/** Fallback where the clipboard API is not available: inside a notebook, in an old browser. */
function copyBySelection(text: string): boolean {
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "visually-hidden";
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  return isCopied;
}

export function CopyButton({ text, label }: { text: string; label: string }) {
  const [status, setStatus] = useState("");
  const copy = async (event: Event): Promise<void> => {
    event.stopPropagation();
    setStatus((await copyText(text)) ? "copied" : "cannot copy");
    setTimeout(() => setStatus(""), 1500);
  };
  return (
    <button type="button" class="copy" aria-label={label} title={label} onClick={copy}>
      {status ? (
        <span role="status">{status}</span>
      ) : (
        <svg viewBox="0 0 16 16" aria-hidden="true">
          <path d="M5 5V2.5h8.5V11H11M2.5 5H11v8.5H2.5Z" />
        </svg>
      )}
    </button>
  );
}
