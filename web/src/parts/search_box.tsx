/** The search box; `/` focuses it, Escape clears it. */
import type { Ref } from "preact";

interface Props {
  readonly value: string;
  readonly onInput: (text: string) => void;
  readonly label: string;
  readonly hint?: string; // the key that focuses it
  readonly inputRef?: Ref<HTMLInputElement>;
}

export function SearchBox({ value, onInput, label, hint, inputRef }: Props) {
  const clear = (event: KeyboardEvent): void => {
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
        onKeyDown={clear}
      />
      {hint && !value && <kbd>{hint}</kbd>}
    </div>
  );
}
