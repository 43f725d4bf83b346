/** Saves what the current view shows: as Markdown, its tables as CSV, its charts as PNG and SVG. */
import { useRef, useState } from "preact/hooks";
import { type Chart, chartToPng, chartToSvg, listCharts } from "../exports/charts";
import { nameFile, saveBlob, saveText } from "../exports/download";
import { viewToMarkdown } from "../exports/markdown";
import { listModules } from "../exports/modules";
import { findTable, type ShownTable, tableToCsv, writeCsv } from "../exports/tables";
import { copyText } from "../parts/copy_button";
import { askForEditor } from "../parts/editor_link";
import { EDITORS, editorChoice } from "../store/editor";
import { page } from "../store/page";
import { route } from "../store/route";
import { findView } from "../views";
import { FileChoice } from "./drop_zone";

interface Exportable {
  readonly tables: readonly { readonly label: string; readonly toCsv: () => string }[];
  readonly charts: readonly Chart[];
}

const NOTHING: Exportable = { tables: [], charts: [] };

function readExportable(): Exportable {
  const view = document.getElementById("view");
  if (!view) return NOTHING;
  const shown = [...view.querySelectorAll(".table")]
    .map(findTable)
    .filter((table): table is ShownTable => table !== null)
    .map((table) => ({ label: table.label, toCsv: () => tableToCsv(table) }));
  const plain = [...view.querySelectorAll("table")].map((table) => ({
    label: table.ariaLabel || table.closest("section[aria-label]")?.ariaLabel || "table",
    toCsv: () => writeCsv(readPlainTable(table)),
  }));
  const tree = view.querySelector("[role='treegrid']") && {
    label: "modules with their children",
    toCsv: () => writeCsv(listModules(page.value.modules)),
  };
  return { tables: [...(tree ? [tree] : []), ...plain, ...shown], charts: listCharts(view) };
}

function readPlainTable(table: HTMLTableElement): string[][] {
  return [...table.rows].map((row) => [...row.cells].map((cell) => cell.innerText.trim()));
}

export function ExportMenu() {
  const menu = useRef<HTMLDivElement>(null);
  const [exportable, setExportable] = useState(NOTHING);
  const [status, setStatus] = useState("");
  const view = findView(route.value.view);
  const toMarkdown = (): string =>
    viewToMarkdown(view.title, document.getElementById("view") ?? document.body);
  const close = (): void => menu.current?.hidePopover();
  const handleToggle = (event: Event): void => {
    if ((event as ToggleEvent).newState !== "open") return;
    setStatus("");
    setExportable(readExportable());
  };
  const copy = async (): Promise<void> =>
    setStatus((await copyText(toMarkdown())) ? "Copied." : "The browser does not allow copying.");
  const savePng = async (chart: Chart): Promise<void> => {
    try {
      saveBlob(nameFile(chart.name, ".png"), await chartToPng(chart));
      close();
    } catch (error) {
      setStatus(`${error instanceof Error ? error.message : error}. Save it as SVG instead.`);
    }
  };
  return (
    <>
      <button
        type="button"
        class="icon-button"
        title="Save this view, its tables and charts"
        aria-label="Export"
        popovertarget="export-menu"
      >
        <svg viewBox="0 0 16 16" aria-hidden="true">
          <path d="M8 2v8M4.8 7 8 10.2 11.2 7M2.5 11v2.5h11V11" />
        </svg>
      </button>
      <div ref={menu} id="export-menu" class="menu" popover="auto" onToggle={handleToggle}>
        <h2>This view</h2>
        <div class="menu-row">
          <span>Markdown</span>
          <button type="button" onClick={copy}>
            Copy
          </button>
          <button
            type="button"
            onClick={() => {
              saveText(nameFile(view.id, ".md"), toMarkdown(), "text/markdown");
              close();
            }}
          >
            Save
          </button>
        </div>
        {exportable.tables.length > 0 && <h2>Tables</h2>}
        {exportable.tables.map(({ label, toCsv }, i) => (
          <div key={`t${i}`} class="menu-row">
            <span title={label}>{label}</span>
            <button
              type="button"
              aria-label={`${label} as CSV`}
              onClick={() => {
                saveText(nameFile(label, ".csv"), toCsv(), "text/csv");
                close();
              }}
            >
              CSV
            </button>
          </div>
        ))}
        {exportable.charts.length > 0 && <h2>Charts</h2>}
        {exportable.charts.map((chart) => (
          <div key={chart.name} class="menu-row">
            <span title={chart.name}>{chart.name}</span>
            <button
              type="button"
              aria-label={`${chart.name} as PNG`}
              onClick={() => savePng(chart)}
            >
              PNG
            </button>
            <button
              type="button"
              aria-label={`${chart.name} as SVG`}
              onClick={() => {
                saveText(nameFile(chart.name, ".svg"), chartToSvg(chart), "image/svg+xml");
                close();
              }}
            >
              SVG
            </button>
          </div>
        ))}
        <h2>Compare</h2>
        <div class="menu-row">
          <span title="you can also drop it onto the page">with a report or recording</span>
          <FileChoice />
        </div>
        <h2>Source lines</h2>
        <div class="menu-row">
          <span>
            {EDITORS.find(({ id }) => id === editorChoice.value.editor)?.title ?? "no editor"}
          </span>
          <button
            type="button"
            onClick={() => {
              close();
              askForEditor();
            }}
          >
            Choose editor
          </button>
        </div>
        {status && <p role="status">{status}</p>}
      </div>
    </>
  );
}
