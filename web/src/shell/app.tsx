/** The frame around every view. */
import { Differences } from "../parts/differences";
import { EditorDialog } from "../parts/editor_link";
import { Empty } from "../parts/empty_message";
import { Tooltip } from "../parts/tooltip";
import { page } from "../store/page";
import { route } from "../store/route";
import { findView } from "../views";
import { Alert } from "./alert";
import { ComparisonBar } from "./comparison_bar";
import { DropZone } from "./drop_zone";
import { ErrorBoundary } from "./error_boundary";
import { Header } from "./header";
import { KeyHelp, useKeys } from "./keys";
import { SelectionBar } from "./selection_bar";
import { Tabs } from "./tabs";
import { UnknownNotice } from "./unknown_notice";

/** Views that begin with a picture of their own, which comes before the differences. */
const HAS_PICTURE: readonly string[] = ["overview", "modules"];

export function App() {
  useKeys();
  const view = findView(route.value.view);
  const { Component } = view;
  return (
    <>
      <button type="button" class="skip" onClick={focusView}>
        Skip to the view
      </button>
      <Header />
      <Tabs />
      <Alert />
      <UnknownNotice />
      <SelectionBar />
      <ComparisonBar />
      <main>
        <div
          id="view"
          class={`view view-${view.id}`}
          role="tabpanel"
          aria-labelledby={`tab-${view.id}`}
          tabIndex={-1}
        >
          <ErrorBoundary key={view.id}>
            {!HAS_PICTURE.includes(view.id) && <Differences view={view.id} title={view.title} />}
            {view.hasData(page.value) ? (
              <Component />
            ) : (
              <Empty command={commandOf(view.id) ?? view.command}>{view.empty}</Empty>
            )}
            {HAS_PICTURE.includes(view.id) && <Differences view={view.id} title={view.title} />}
          </ErrorBoundary>
        </div>
      </main>
      <KeyHelp />
      <EditorDialog />
      <DropZone />
      <Tooltip />
    </>
  );
}

/** The command that records the data of a view, with the user's target where it is known. */
function commandOf(view: string): string | undefined {
  return page.value.empty_views.find((empty) => empty.view === view)?.command;
}

function focusView(): void {
  document.getElementById("view")?.focus();
}
