/** Names parts of the address that this page does not know, and offers to clear them. */
import { page } from "../store/page";
import { clearedHref, shorten, unknownParts } from "./unknown_parts";

export function UnknownNotice() {
  const parts = unknownParts.value;
  if (!parts.length) return null;
  return (
    <section class="notice" aria-label="unknown parts of the address">
      <p role="status">
        <b>
          The address names what {page.value.run.title || "this page"} does not have, so that it has
          no effect:
        </b>
      </p>
      <ul>
        {parts.map(({ param, label, value, reason }) => (
          <li key={param}>
            {label} <code>{shorten(value)}</code>
            <span class="dim"> ({reason})</span>
          </li>
        ))}
      </ul>
      <a class="small-button" href={clearedHref()}>
        Clear {parts.length > 1 ? "them" : "it"}
      </a>
    </section>
  );
}
