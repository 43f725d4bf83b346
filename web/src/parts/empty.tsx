/** Why there is nothing to see, in a sentence, and what would change that. */
import type { ComponentChildren } from "preact";

export function Empty({ children, command }: { children: ComponentChildren; command?: string }) {
  return (
    <div class="empty">
      <p>{children}</p>
      {command && <code class="empty-command">{command}</code>}
    </div>
  );
}
