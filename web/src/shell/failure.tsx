/** What is shown in place of a view that cannot be drawn: the fact, and what is still there. */
import { Component, type ComponentChildren } from "preact";

export function Failure({ error }: { error: unknown }) {
  return (
    <div class="failure" role="alert">
      <h1>This cannot be shown</h1>
      <p>{error instanceof Error ? error.message : String(error)}</p>
    </div>
  );
}

/** A view that fails leaves the others alone; `key` it by view, so that each starts anew. */
export class Boundary extends Component<{ children: ComponentChildren }, { error: unknown }> {
  override state = { error: null as unknown };

  static override getDerivedStateFromError(error: unknown) {
    return { error };
  }

  override componentDidCatch(error: unknown): void {
    console.error(error);
  }

  override render() {
    return this.state.error === null ? this.props.children : <Failure error={this.state.error} />;
  }
}
