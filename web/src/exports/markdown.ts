/** A view as Markdown: headings, texts, lists and tables, read from what the page displays. */
import { page } from "../store/page";
import { escapeMarkdown, findTable, tableToMarkdown } from "./tables";

// Controls, pictures, and what only screen readers read; other buttons are rows or tiles with figures.
const SKIPPED = [
  ".choices, .close, .copy, .small-button, .text-button, .panel-controls, .table-bottom",
  "input, select, svg, canvas, [aria-hidden='true'], .visually-hidden",
].join(", ");

export function viewToMarkdown(title: string, view: Element): string {
  const { run } = page.value;
  const facts = [run.ranks, run.world, run.torch_version && `torch ${run.torch_version}`];
  const head = [
    `# ${escapeMarkdown(run.title)}: ${title}`,
    escapeMarkdown(facts.filter(Boolean).join(" · ")),
  ];
  return `${[...head, ...readBlocks(view)].filter(Boolean).join("\n\n")}\n`;
}

/** Blocks of an element's content, in order. */
function readBlocks(element: Element): string[] {
  const blocks: string[] = [];
  for (const child of element.children) {
    const block = readBlock(child);
    blocks.push(...(typeof block === "string" ? [block] : block));
  }
  return blocks.filter(Boolean);
}

function readBlock(element: Element): string | string[] {
  if (element.matches(SKIPPED)) return "";
  const table = findTable(element);
  if (table) return table.rows.length ? tableToMarkdown(table) : "No rows.";
  if (element.matches("h1, h2, h3, h4")) {
    return `${"#".repeat(Number(element.tagName[1]))} ${readText(element)}`;
  }
  if (element.matches("table")) return readTable(element);
  if (element.matches("pre")) return fence(element.textContent ?? "");
  if (element.matches("ul, ol")) return readList(element);
  if (element.matches("dl")) return readFacts(element);
  if (element.matches("p, code, summary, a, span, label, button") || !element.children.length) {
    return readText(element);
  }
  return readBlocks(element);
}

function readList(element: Element): string {
  const items = [...element.children].map((item) => {
    const blocks = [...item.querySelectorAll("pre")].map((code) => fence(code.textContent ?? ""));
    return [`- ${readText(item, "pre")}`, ...blocks].join("\n\n");
  });
  return items.filter((item) => item !== "- ").join("\n");
}

function readFacts(element: Element): string {
  return [...element.querySelectorAll("dt")]
    .map((term) => {
      const definition = term.nextElementSibling;
      return `- **${readText(term)}:** ${definition ? readText(definition) : ""}`;
    })
    .join("\n");
}

function readTable(element: Element): string {
  const rows = [...element.querySelectorAll("tr")].map((row) =>
    [...row.querySelectorAll("th, td")].map((cell) => readText(cell)),
  );
  const width = Math.max(0, ...rows.map((row) => row.length));
  if (!rows.length || !width) return "";
  const lines = rows.map((row) => `| ${pad(row, width).join(" | ")} |`);
  lines.splice(1, 0, `|${" --- |".repeat(width)}`);
  return lines.join("\n");
}

function pad(cells: readonly string[], width: number): string[] {
  return Array.from({ length: width }, (_, i) => cells[i] ?? "");
}

function fence(text: string): string {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
  const mark = "`".repeat(longest + 1);
  return `${mark}\n${text.replace(/\n+$/, "")}\n${mark}`;
}

/** The text of an element without controls; texts of neighbouring elements are separated. */
function readText(element: Element, without = ""): string {
  const parts: string[] = [];
  const skipped = [SKIPPED, without].filter(Boolean).join(", ");
  const read = (node: Node): void => {
    if (node.nodeType === Node.TEXT_NODE) parts.push(node.textContent ?? "");
    else if (node instanceof Element && (node === element || !node.matches(skipped))) {
      node.childNodes.forEach(read);
      parts.push(" ");
    }
  };
  read(element);
  return escapeMarkdown(parts.join("").trim()).replace(/ ([.,;:)])/g, "$1");
}
