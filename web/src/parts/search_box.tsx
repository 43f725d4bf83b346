/** The search box; `/` focuses it, Escape clears it, Enter selects what it offers to. */
import type { Ref } from "preact";

interface Props {
  readonly value: string;
  readonly onInput: (text: string) => void;
  readonly label: string;
  readonly hint?: string; // the key that focuses it
  readonly error?: string; // why the text is not a search
  readonly offer?: string; // what Enter does
  readonly onEnter?: () => void;
  readonly inputRef?: Ref<HTMLInputElement>;
}

export function SearchBox(props: Props) {
  const { value, onInput, label, hint, error, offer, onEnter, inputRef } = props;
  const handleKey = (event: KeyboardEvent): void => {
    if (event.key === "Enter" && offer) onEnter?.();
    if (event.key !== "Escape") return;
    event.stopPropagation();
    if (value) onInput("");
    else (event.currentTarget as HTMLElement).blur();
  };
  return (
    <div class="search-box" role="search">
      <svg viewBox="0 0 16 16" aria-hidden="true">
        <path d="M7 2a5 5 0 1 1 0 10A5 5 0 0 1 7 2Zm3.7 8.7L14 14" />
      </svg>
      <input
        ref={inputRef}
        type="search"
        value={value}
        placeholder={label}
        aria-label={label}
        spellcheck={false}
        autocomplete="off"
        onInput={(event) => onInput(event.currentTarget.value)}
        aria-invalid={error ? "true" : undefined}
        onKeyDown={handleKey}
      />
      {hint && !value && <kbd>{hint}</kbd>}
      {(error || offer) && (
        <p class={error ? "search-note search-error" : "search-note"} role="status">
          {error || offer}
        </p>
      )}
    </div>
  );
}
