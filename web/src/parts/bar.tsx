/** A figure with a bar that shows its share of the column's maximum. */

interface Props {
  readonly value: number;
  readonly max: number; // of the column
  readonly text: string;
  readonly color?: string;
}

export function Bar({ value, max, text, color }: Props) {
  const share = max > 0 ? Math.min(Math.max(value / max, 0), 1) : 0;
  return (
    <span class="bar">
      <span class={share > 0 ? "bar-track" : "bar-none"}>
        {share > 0 && (
          <span class="bar-fill" style={{ width: `${100 * share}%`, background: color }} />
        )}
      </span>
      <span class="bar-text">{text}</span>
    </span>
  );
}
