/** Charts as SVG and PNG files: SVG and canvases as they are, boxes of HTML as rectangles and texts. */
import { findDrawing } from "../parts/canvas";
import { escapeXml, makeTag, SvgContext } from "./svg_context";

export interface Chart {
  readonly name: string;
  readonly element: Element;
}

const MIN_WIDTH = 120;
const MIN_HEIGHT = 40;
const PADDING = 12;
const PNG_SCALE = 2;

/** The charts of a view, named after their sections; an icon is no chart. */
export function listCharts(view: Element): Chart[] {
  const elements = [...view.querySelectorAll("[data-chart], svg, canvas")].filter((element) => {
    const { width, height } = element.getBoundingClientRect();
    const isInside = element.parentElement?.closest("[data-chart]");
    return width >= MIN_WIDTH && height >= MIN_HEIGHT && !isInside;
  });
  const names = new Map<string, number>();
  return elements.map((element) => {
    const name = nameChart(element);
    const count = (names.get(name) ?? 0) + 1;
    names.set(name, count);
    return { name: count > 1 ? `${name} ${count}` : name, element };
  });
}

function nameChart(element: Element): string {
  const own = element.getAttribute("data-chart") || element.getAttribute("aria-label");
  return own || element.closest("section[aria-label]")?.getAttribute("aria-label") || "chart";
}

/** A document that looks as the chart does on the page, in its theme. */
export function chartToSvg({ name, element }: Chart): string {
  const bounds = element.getBoundingClientRect();
  const [width, height] = [bounds.width + 2 * PADDING, bounds.height + 2 * PADDING];
  const surface = getComputedStyle(document.documentElement).getPropertyValue("--surface").trim();
  const content = drawElement(element, bounds.left - PADDING, bounds.top - PADDING);
  return makeTag(
    "svg",
    { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` },
    `<title>${escapeXml(name)}</title>${makeTag("rect", { width, height, fill: surface })}${content}`,
  );
}

function drawElement(element: Element, left: number, top: number): string {
  const style = getComputedStyle(element);
  if (style.display === "none" || style.visibility === "hidden") return "";
  const bounds = element.getBoundingClientRect();
  const [x, y] = [bounds.left - left, bounds.top - top];
  if (element instanceof HTMLCanvasElement) return drawCanvas(element, x, y);
  if (element instanceof SVGSVGElement) return drawSvg(element, x, y, bounds);
  const parts = [drawBox(style, x, y, bounds)];
  for (const node of element.childNodes) {
    if (node instanceof Element) parts.push(drawElement(node, left, top));
    else if (node.nodeType === Node.TEXT_NODE)
      parts.push(drawText(node, element, style, left, top));
  }
  return parts.join("");
}

function drawBox(style: CSSStyleDeclaration, x: number, y: number, bounds: DOMRect): string {
  const fill = style.backgroundColor;
  const border = Number.parseFloat(style.borderTopWidth) || 0;
  const isClear = fill === "transparent" || /^rgba\(.*, 0\)$|\/ 0\)$/.test(fill);
  if ((isClear && !border) || !bounds.width || !bounds.height) return "";
  return makeTag("rect", {
    x,
    y,
    width: bounds.width,
    height: bounds.height,
    rx: Number.parseFloat(style.borderTopLeftRadius) || 0,
    fill: isClear ? "none" : fill,
    ...(border ? { stroke: style.borderTopColor, "stroke-width": border } : {}),
    opacity: Number(style.opacity),
  });
}

/** A line of text, cut where its box ends. */
function drawText(
  node: Node,
  element: Element,
  style: CSSStyleDeclaration,
  left: number,
  top: number,
): string {
  const text = node.textContent?.trim();
  if (!text) return "";
  const range = document.createRange();
  range.selectNodeContents(node);
  const line = range.getBoundingClientRect();
  const box = element.getBoundingClientRect();
  if (!line.width || !box.width) return "";
  const numChars = Math.floor(
    (text.length * Math.min(line.width, box.right - line.left)) / line.width,
  );
  const shown = numChars < text.length ? `${text.slice(0, Math.max(0, numChars - 1))}…` : text;
  return makeTag(
    "text",
    {
      x: line.left - left,
      y: line.top - top + line.height / 2,
      fill: style.color,
      "dominant-baseline": "central",
      style: `font: ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`,
    },
    escapeXml(shown),
  );
}

function drawCanvas(canvas: HTMLCanvasElement, x: number, y: number): string {
  const drawing = findDrawing(canvas);
  if (!drawing) return "";
  const context = new SvgContext();
  drawing(context as unknown as CanvasRenderingContext2D);
  return makeTag("g", { transform: `translate(${x} ${y})` }, context.elements.join(""));
}

// What style sheets set on parts of charts.
const PROPERTIES = [
  "fill",
  "fill-opacity",
  "stroke",
  "stroke-width",
  "stroke-dasharray",
  "stroke-opacity",
  "stroke-linecap",
  "stroke-linejoin",
  "opacity",
  "paint-order",
  "font-family",
  "font-size",
  "font-weight",
  "text-anchor",
  "dominant-baseline",
];

function drawSvg(svg: SVGSVGElement, x: number, y: number, bounds: DOMRect): string {
  const copy = svg.cloneNode(true) as SVGSVGElement;
  const originals = [svg, ...svg.querySelectorAll("*")];
  const copies = [copy, ...copy.querySelectorAll("*")];
  originals.forEach((original, i) => {
    const style = getComputedStyle(original);
    const target = copies[i]!;
    for (const name of PROPERTIES) target.setAttribute(name, style.getPropertyValue(name));
    target.removeAttribute("class");
    target.removeAttribute("style");
  });
  copy.setAttribute("x", String(x));
  copy.setAttribute("y", String(y));
  copy.setAttribute("width", String(bounds.width));
  copy.setAttribute("height", String(bounds.height));
  return new XMLSerializer().serializeToString(copy);
}

/** Draws the SVG on a canvas of twice the resolution. */
export async function chartToPng(chart: Chart): Promise<Blob> {
  const image = new Image();
  const svg = chartToSvg(chart);
  const loaded = new Promise<void>((resolve, reject) => {
    image.onload = () => resolve();
    image.onerror = () => reject(new Error(`the chart '${chart.name}' cannot be drawn`));
  });
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await loaded;
  const canvas = document.createElement("canvas");
  canvas.width = Math.ceil(image.width * PNG_SCALE);
  canvas.height = Math.ceil(image.height * PNG_SCALE);
  canvas.getContext("2d")!.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve, reject) => {
    canvas.toBlob((blob) =>
      blob ? resolve(blob) : reject(new Error(`the chart '${chart.name}' is too large`)),
    );
  });
}
