/** The views as tabs: links that arrow keys move between. */
import { useEffect, useRef } from "preact/hooks";
import { ToneMark, toneOf } from "../parts/badge";
import { page } from "../store/page";
import { hrefTo, navigate, parseRoute, route } from "../store/route";
import { findView, VIEWS } from "../views";

const KEY_STEPS: Readonly<Record<string, (index: number) => number>> = {
  ArrowRight: (index) => (index + 1) % VIEWS.length,
  ArrowLeft: (index) => (index + VIEWS.length - 1) % VIEWS.length,
  Home: () => 0,
  End: () => VIEWS.length - 1,
};

/** Marks a view in which the verdict has something bad. */
function TabMark({ view }: { view: string }) {
  const concern = page.value.verdict?.concerns.find((item) => item.view === view);
  const tone = toneOf(concern?.judgement ?? "");
  if (!concern || !["bad", "warn"].includes(tone)) return null;
  return (
    <span class={`tab-mark tone-${tone}`} title={`${concern.label}: ${concern.fact}`}>
      <ToneMark tone={tone} />
      <span class="visually-hidden">{concern.label}</span>
    </span>
  );
}

export function Tabs() {
  const list = useRef<HTMLDivElement>(null);
  const current = findView(route.value.view);
  useEffect(() => {
    // On a narrow screen the tabs scroll.
    document
      .getElementById(`tab-${current.id}`)
      ?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }, [current.id]);
  const handleKey = (event: KeyboardEvent): void => {
    const step = KEY_STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    const next = VIEWS[step(VIEWS.indexOf(current))]!;
    navigate(parseRoute(hrefTo(next.id)));
    document.getElementById(`tab-${next.id}`)?.focus();
  };
  return (
    <div ref={list} class="tabs" role="tablist" aria-label="views" onKeyDown={handleKey}>
      {VIEWS.map((view) => {
        const isCurrent = view === current;
        const hasData = view.hasData(page.value);
        return (
          <a
            key={view.id}
            id={`tab-${view.id}`}
            class={hasData ? "tab" : "tab tab-empty"}
            role="tab"
            href={hrefTo(view.id)}
            aria-selected={isCurrent}
            aria-controls="view"
            tabIndex={isCurrent ? 0 : -1}
            title={hasData ? undefined : view.empty}
          >
            {view.title}
            <TabMark view={view.id} />
          </a>
        );
      })}
    </div>
  );
}
