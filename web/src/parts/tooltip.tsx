/** The page's only tooltip, next to the pointer or the focused element. */
import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";

interface Tip {
  readonly content: ComponentChildren;
  readonly x: number;
  readonly y: number;
}

const currentTip = signal<Tip | null>(null);
const MARGIN = 12;

export function showTip(content: ComponentChildren, x: number, y: number): void {
  currentTip.value = { content, x, y };
}

export function hideTip(): void {
  currentTip.value = null;
}

/** Spread over an element: `<button {...tip("what it does")}>`. */
export function tip(content: ComponentChildren | (() => ComponentChildren)) {
  const makeContent = (): ComponentChildren =>
    typeof content === "function" ? content() : content;
  return {
    onPointerMove: (event: PointerEvent): void =>
      showTip(makeContent(), event.clientX, event.clientY),
    onPointerLeave: hideTip,
    onFocus: (event: FocusEvent): void => {
      const element = event.currentTarget as Element;
      if (!element.matches(":focus-visible")) return;
      const box = element.getBoundingClientRect();
      showTip(makeContent(), box.left, box.bottom);
    },
    onBlur: hideTip,
  };
}

/** Rendered once, by the shell. */
export function Tooltip() {
  const box = useRef<HTMLDivElement>(null);
  const current = currentTip.value;
  useLayoutEffect(() => {
    if (!box.current || !current) return;
    const { width, height } = box.current.getBoundingClientRect();
    const left = Math.min(current.x + MARGIN, innerWidth - width - MARGIN);
    const isBelow = current.y + MARGIN + height < innerHeight;
    box.current.style.left = `${Math.max(left, MARGIN)}px`;
    box.current.style.top = `${isBelow ? current.y + MARGIN : Math.max(current.y - height - MARGIN, 0)}px`;
  });
  if (!current) return null;
  return (
    <div ref={box} class="tooltip" role="tooltip">
      {current.content}
    </div>
  );
}
