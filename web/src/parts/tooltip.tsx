/** One tooltip for the whole page: what a thing is, next to the pointer or the focus. */
import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";

interface Tip {
  readonly content: ComponentChildren;
  readonly x: number;
  readonly y: number;
}

const shown = signal<Tip | null>(null);
const MARGIN = 12;

export function showTip(content: ComponentChildren, x: number, y: number): void {
  shown.value = { content, x, y };
}

export function hideTip(): void {
  shown.value = null;
}

/** Spread over an element: `<button {...tip("what it does")}>`. */
export function tip(content: ComponentChildren | (() => ComponentChildren)) {
  const make = (): ComponentChildren => (typeof content === "function" ? content() : content);
  return {
    onPointerMove: (event: PointerEvent): void => showTip(make(), event.clientX, event.clientY),
    onPointerLeave: hideTip,
    onFocus: (event: FocusEvent): void => {
      const element = event.currentTarget as Element;
      if (!element.matches(":focus-visible")) return;
      const box = element.getBoundingClientRect();
      showTip(make(), box.left, box.bottom);
    },
    onBlur: hideTip,
  };
}

/** Drawn once, by the shell. */
export function Tooltip() {
  const box = useRef<HTMLDivElement>(null);
  const now = shown.value;
  useLayoutEffect(() => {
    if (!box.current || !now) return;
    const { width, height } = box.current.getBoundingClientRect();
    const left = Math.min(now.x + MARGIN, innerWidth - width - MARGIN);
    const isBelow = now.y + MARGIN + height < innerHeight;
    box.current.style.left = `${Math.max(left, MARGIN)}px`;
    box.current.style.top = `${isBelow ? now.y + MARGIN : Math.max(now.y - height - MARGIN, 0)}px`;
  });
  if (!now) return null;
  return (
    <div ref={box} class="tooltip" role="tooltip">
      {now.content}
    </div>
  );
}
