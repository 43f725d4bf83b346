/** A few choices side by side, one of which holds. */

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
      {choices.map((one) => (
        <button
          type="button"
          key={one.id}
          aria-pressed={one.id === value}
          title={one.hint}
          onClick={() => onChange(one.id)}
        >
          {one.title}
        </button>
      ))}
    </div>
  );
}
