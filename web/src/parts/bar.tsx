/** A figure with a bar behind it, so that a column of them reads at a glance. */

interface Props {
  readonly value: number;
  readonly most: number; // of the column
  readonly text: string;
  readonly color?: string;
}

export function Bar({ value, most, text, color }: Props) {
  const share = most > 0 ? Math.min(Math.max(value / most, 0), 1) : 0;
  return (
    <span class="bar">
      <span class={share > 0 ? "bar-track" : ""}>
        {share > 0 && (
          <span class="bar-fill" style={{ width: `${100 * share}%`, background: color }} />
        )}
      </span>
      <span class="bar-text">{text}</span>
    </span>
  );
}
