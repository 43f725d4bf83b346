/** A part of a view: a heading, a note on how to read it, controls, and what it shows. */
import type { ComponentChildren } from "preact";

interface Props {
  readonly title: string;
  readonly note?: ComponentChildren;
  readonly controls?: ComponentChildren;
  readonly isBare?: boolean; // without a frame, where what it shows has its own
  readonly children: ComponentChildren;
}

export function Panel({ title, note, controls, isBare = false, children }: Props) {
  return (
    <section class={isBare ? "panel panel-bare" : "panel"} aria-label={title}>
      <header class="panel-head">
        <h2>{title}</h2>
        {note && <p class="panel-note">{note}</p>}
        {controls && <div class="panel-controls">{controls}</div>}
      </header>
      {children}
    </section>
  );
}
