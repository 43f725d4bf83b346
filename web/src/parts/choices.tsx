/** A group of buttons of which one is selected. */

export interface Choice {
  readonly id: string;
  readonly title: string;
  readonly hint?: string;
}

interface Props {
  readonly label: string;
  readonly choices: readonly Choice[];
  readonly value: string;
  readonly onChange: (id: string) => void;
}

export function Choices({ label, choices, value, onChange }: Props) {
  return (
    <div class="choices" role="group" aria-label={label}>
      {choices.map((choice) => (
        <button
          type="button"
          key={choice.id}
          aria-pressed={choice.id === value}
          title={choice.hint}
          onClick={() => onChange(choice.id)}
        >
          {choice.title}
        </button>
      ))}
    </div>
  );
}
