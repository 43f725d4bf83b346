/** What is shown in place of a view that cannot be rendered. */
import { Component, type ComponentChildren } from "preact";

export function ErrorMessage({ error }: { error: unknown }) {
  return (
    <div class="failure" role="alert">
      <h1>This cannot be shown</h1>
      <p>{error instanceof Error ? error.message : String(error)}</p>
    </div>
  );
}

/** Keeps a failing view from taking down the others; use the view's id as `key`. */
export class ErrorBoundary extends Component<{ children: ComponentChildren }, { error: unknown }> {
  override state = { error: null as unknown };

  static override getDerivedStateFromError(error: unknown) {
    return { error };
  }

  override componentDidCatch(error: unknown): void {
    console.error(error);
  }

  override render() {
    return this.state.error === null ? (
      this.props.children
    ) : (
      <ErrorMessage error={this.state.error} />
    );
  }
}
