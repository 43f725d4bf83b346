/** A value of a facet, such as an axis or a rank; clicking it selects it in every view. */
import { type ComponentChildren, createContext } from "preact";
import { useContext } from "preact/hooks";
import { type Facet, selectedText, selectionHref } from "../store/selection";

/** Whether a link is in a cell of a table, whose arrow keys lead to it: Tab skips it there. */
export const InCell = createContext(false);

interface Props {
  readonly facet: Facet;
  readonly value: string;
  readonly isInline?: boolean; // in a sentence, which wraps
  readonly children: ComponentChildren;
}

export function FacetLink({ facet, value, isInline = false, children }: Props) {
  const isSelected = selectedText(facet) === value;
  const isInCell = useContext(InCell);
  return (
    <a
      class={isInline ? "facet-link is-inline" : "facet-link clip"}
      href={selectionHref({ [facet]: isSelected ? null : value })}
      aria-current={isSelected ? "true" : undefined}
      title={isSelected ? `${value}: show all again` : `${value}: select in every view`}
      tabIndex={isInCell ? -1 : undefined}
    >
      {children}
    </a>
  );
}
