/** `all_gather[tp]`: a click on the kind or on the axis selects it in every view. */
import { FacetLink } from "./facet_link";
import { Highlight } from "./highlight";

interface Props {
  readonly kind: string;
  readonly axis: string; // empty for none
}

export function CollectiveName({ kind, axis }: Props) {
  return (
    <span>
      <FacetLink facet="kind" value={kind} isInline>
        <Highlight text={kind} />
      </FacetLink>
      {axis && (
        <>
          [
          <FacetLink facet="axis" value={axis} isInline>
            <Highlight text={axis} />
          </FacetLink>
          ]
        </>
      )}
    </span>
  );
}
