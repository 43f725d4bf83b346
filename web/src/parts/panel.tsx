/** A section of a view: heading, note, controls and content. */
import type { ComponentChildren } from "preact";
import type { Facet } from "../store/selection";
import { Unfollowed } from "./unfollowed";

interface Props {
  readonly title: string;
  readonly note?: ComponentChildren;
  readonly controls?: ComponentChildren;
  readonly follows?: readonly Facet[]; // what its content is filtered by; by default, everything
  readonly isBare?: boolean; // without a border, if the content has its own
  readonly children: ComponentChildren;
}

export function Panel({ title, note, controls, follows, isBare = false, children }: Props) {
  return (
    <section class={isBare ? "panel panel-bare" : "panel"} aria-label={title}>
      <header class="panel-head">
        <h2>{title}</h2>
        {note && <p class="panel-note">{note}</p>}
        {controls && <div class="panel-controls">{controls}</div>}
      </header>
      {follows && <Unfollowed follows={follows} />}
      {children}
    </section>
  );
}
