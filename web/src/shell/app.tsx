/** The frame around every view. */
import { Empty } from "../parts/empty";
import { Tooltip } from "../parts/tooltip";
import { page } from "../store/page";
import { route } from "../store/route";
import { viewOf } from "../views";
import { Boundary } from "./failure";
import { Header } from "./header";
import { KeyHelp, useKeys } from "./keys";
import { Tabs } from "./tabs";

export function App() {
  useKeys();
  const view = viewOf(route.value.view);
  const { Component } = view;
  return (
    <>
      <button type="button" class="skip" onClick={focusView}>
        Skip to the view
      </button>
      <Header />
      <Tabs />
      <main>
        <div
          id="view"
          class={`view view-${view.id}`}
          role="tabpanel"
          aria-labelledby={`tab-${view.id}`}
          tabIndex={-1}
        >
          <Boundary key={view.id}>
            {view.hasData(page.value) ? (
              <Component />
            ) : (
              <Empty command={view.command}>{view.empty}</Empty>
            )}
          </Boundary>
        </div>
      </main>
      <KeyHelp />
      <Tooltip />
    </>
  );
}

function focusView(): void {
  document.getElementById("view")?.focus();
}
