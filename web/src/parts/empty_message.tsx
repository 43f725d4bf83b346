/** Why there is no data, in a sentence, and a command that records it. */
import type { ComponentChildren } from "preact";
import { Command } from "./command";

export function Empty({ children, command }: { children: ComponentChildren; command?: string }) {
  return (
    <div class="empty">
      <p>{children}</p>
      {command && <Command text={command} />}
    </div>
  );
}
