/** The drawing context of a canvas that writes SVG, for charts that are drawn on canvases. */

type Attributes = Readonly<Record<string, string | number>>;

interface State {
  fillStyle: string;
  strokeStyle: string;
  lineWidth: number;
  font: string;
  textAlign: string;
  textBaseline: string;
  globalAlpha: number;
  dash: readonly number[];
  clip: string;
  matrix: DOMMatrix;
}

const ANCHORS: Readonly<Record<string, string>> = {
  center: "middle",
  right: "end",
  end: "end",
};
const BASELINES: Readonly<Record<string, string>> = {
  middle: "central",
  top: "text-before-edge",
  hanging: "text-before-edge",
  bottom: "text-after-edge",
};

let numClips = 0;

/** Writes what the page's charts draw: rectangles, lines, paths and texts, with clips and moves. */
export class SvgContext {
  fillStyle = "#000";
  strokeStyle = "#000";
  lineWidth = 1;
  font = "10px sans-serif";
  textAlign = "start";
  textBaseline = "alphabetic";
  globalAlpha = 1;
  readonly elements: string[] = [];
  private dash: readonly number[] = [];
  private clipId = "";
  private matrix = new DOMMatrix();
  private path = "";
  private readonly saved: State[] = [];
  private readonly measure = document.createElement("canvas").getContext("2d")!;

  save(): void {
    const { fillStyle, strokeStyle, lineWidth, font, textAlign, textBaseline, globalAlpha } = this;
    this.saved.push({
      ...{ fillStyle, strokeStyle, lineWidth, font, textAlign, textBaseline, globalAlpha },
      dash: this.dash,
      clip: this.clipId,
      matrix: DOMMatrix.fromMatrix(this.matrix),
    });
  }

  restore(): void {
    const state = this.saved.pop();
    if (!state) return;
    const { dash, clip, matrix, ...rest } = state;
    Object.assign(this, rest);
    this.dash = dash;
    this.clipId = clip;
    this.matrix = matrix;
  }

  translate(x: number, y: number): void {
    this.matrix = this.matrix.translate(x, y);
  }

  scale(x: number, y: number): void {
    this.matrix = this.matrix.scale(x, y);
  }

  rotate(angle: number): void {
    this.matrix = this.matrix.rotate((180 * angle) / Math.PI);
  }

  setLineDash(dash: readonly number[]): void {
    this.dash = dash;
  }

  beginPath(): void {
    this.path = "";
  }

  moveTo(x: number, y: number): void {
    this.path += `M${round(x)} ${round(y)}`;
  }

  lineTo(x: number, y: number): void {
    this.path += `L${round(x)} ${round(y)}`;
  }

  rect(x: number, y: number, width: number, height: number): void {
    this.path += `M${round(x)} ${round(y)}h${round(width)}v${round(height)}h${round(-width)}Z`;
  }

  roundRect(x: number, y: number, width: number, height: number): void {
    this.rect(x, y, width, height);
  }

  arc(x: number, y: number, radius: number, start: number, end: number): void {
    const point = (angle: number): string =>
      `${round(x + radius * Math.cos(angle))} ${round(y + radius * Math.sin(angle))}`;
    const middle = (start + end) / 2;
    const arcTo = `A${round(radius)} ${round(radius)} 0 0 1 `;
    this.path += `M${point(start)}${arcTo}${point(middle)}${arcTo}${point(end)}`;
  }

  closePath(): void {
    this.path += "Z";
  }

  clip(): void {
    const id = `clip-${++numClips}`;
    this.elements.push(`<clipPath id="${id}">${this.tag("path", { d: this.path })}</clipPath>`);
    this.clipId = id;
  }

  fill(): void {
    this.add("path", { d: this.path, ...this.fillAttributes() });
  }

  stroke(): void {
    this.add("path", { d: this.path, fill: "none", ...this.strokeAttributes() });
  }

  fillRect(x: number, y: number, width: number, height: number): void {
    this.add("rect", { x, y, width, height, ...this.fillAttributes() });
  }

  strokeRect(x: number, y: number, width: number, height: number): void {
    this.add("rect", { x, y, width, height, fill: "none", ...this.strokeAttributes() });
  }

  clearRect(): void {}

  measureText(text: string): TextMetrics {
    this.measure.font = this.font;
    return this.measure.measureText(text);
  }

  fillText(text: string, x: number, y: number): void {
    const attributes = {
      x,
      y,
      ...this.fillAttributes(),
      "text-anchor": ANCHORS[this.textAlign] ?? "start",
      "dominant-baseline": BASELINES[this.textBaseline] ?? "alphabetic",
      style: `font: ${this.font}`,
    };
    this.add("text", attributes, escapeXml(text));
  }

  private fillAttributes(): Attributes {
    return { fill: this.fillStyle, ...this.opacity() };
  }

  private strokeAttributes(): Attributes {
    const dash: Attributes = this.dash.length ? { "stroke-dasharray": this.dash.join(" ") } : {};
    return { stroke: this.strokeStyle, "stroke-width": this.lineWidth, ...dash, ...this.opacity() };
  }

  private opacity(): Attributes {
    return this.globalAlpha < 1 ? { opacity: this.globalAlpha } : {};
  }

  private add(name: string, attributes: Attributes, content = ""): void {
    const clip: Attributes = this.clipId ? { "clip-path": `url(#${this.clipId})` } : {};
    this.elements.push(this.tag(name, { ...attributes, ...clip }, content));
  }

  private tag(name: string, attributes: Attributes, content = ""): string {
    const { a, b, c, d, e, f } = this.matrix;
    const transform: Attributes = this.matrix.isIdentity
      ? {}
      : { transform: `matrix(${[a, b, c, d, e, f].map(round).join(" ")})` };
    return makeTag(name, { ...attributes, ...transform }, content);
  }
}

export function makeTag(name: string, attributes: Attributes, content = ""): string {
  const written = Object.entries(attributes)
    .map(
      ([key, value]) => ` ${key}="${typeof value === "number" ? round(value) : escapeXml(value)}"`,
    )
    .join("");
  return content ? `<${name}${written}>${content}</${name}>` : `<${name}${written}/>`;
}

const ENTITIES: Readonly<Record<string, string>> = {
  "&": "&amp;",
  "<": "&lt;",
  ">": "&gt;",
  '"': "&quot;",
};

export function escapeXml(text: string): string {
  return text.replace(/[&<>"]/g, (char) => ENTITIES[char]!);
}

function round(value: number): number {
  return Math.round(value * 100) / 100;
}
