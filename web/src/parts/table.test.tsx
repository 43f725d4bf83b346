// @vitest-environment happy-dom
import { render } from "preact";
import { act } from "preact/test-utils";
import { beforeEach, expect, test } from "vitest";
import { makePage } from "../store/empty_page";
import { page } from "../store/page";
import { navigate, route } from "../store/route";
import { type Column, Table, type TableProps } from "./table";

const NUM_ROWS = 20_000;
const columns: readonly Column[] = [
  { id: "name", title: "name", width: 10, grow: 1, isText: true, value: (row) => `call ${row}` },
  { id: "size", title: "size", width: 6, align: "end", value: (row) => (row * 7919) % NUM_ROWS },
];
const props: TableProps = {
  label: "calls",
  numRows: NUM_ROWS,
  columns,
  empty: "No calls were recorded.",
  modules: (row) => row % 3,
  detail: (row) => <p>more on {row}</p>,
};

beforeEach(() => {
  // A root with two modules below it
  page.value = makePage({
    modules: {
      path: ["", "a", "b"],
      label: ["Net", "a", "b"],
      parent: [-1, 0, 0],
      end: [3, 2, 3],
      first_identical: [0, 1, 2],
    },
    terms: [],
  });
  navigate({ view: "overview", params: {} });
  document.body.replaceChildren();
});

function renderTable(tableProps: TableProps = props): HTMLElement {
  const root = document.body.appendChild(document.createElement("div"));
  act(() => render(<Table {...tableProps} />, root));
  return root;
}

function textsOf(root: HTMLElement, selector: string): string[] {
  return [...root.querySelectorAll(selector)].map((element) => element.textContent ?? "");
}

function press(root: HTMLElement, key: string): void {
  const grid = root.querySelector("[role=grid]")!;
  act(() => void grid.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })));
}

const FIRST_CELLS = ".table-body .cell:first-child";

test("of 20,000 rows only visible ones are drawn, and all are counted", () => {
  const root = renderTable();
  expect(root.querySelectorAll(".table-body .table-row").length).toBeLessThan(60);
  expect(root.querySelector("[role=grid]")!.getAttribute("aria-rowcount")).toBe("20001");
  expect(root.querySelector("[role=status]")!.textContent).toBe("20,000 rows");
});

test("a click on a column's head sorts by it and sets aria-sort", () => {
  const root = renderTable();
  const head = root.querySelectorAll<HTMLElement>("[role=columnheader]")[1]!;
  act(() => head.querySelector("button")!.click());
  expect(head.getAttribute("aria-sort")).toBe("descending");
  expect(textsOf(root, ".table-body .cell-end").slice(0, 2)).toEqual(["19999", "19998"]);
});

test("rows are filtered by the search and the selected module", () => {
  const root = renderTable();
  act(() => navigate({ view: "overview", params: { m: "b", q: "call 1999" } }));
  expect(textsOf(root, FIRST_CELLS)).toEqual([
    "call 11999",
    "call 19991",
    "call 19994",
    "call 19997",
  ]);
  expect(root.querySelector("[role=status]")!.textContent).toContain("of 20,000 rows in b");
});

test("keys move between rows, show details, and select the row's module", () => {
  const root = renderTable();
  press(root, "ArrowDown");
  press(root, "ArrowDown");
  expect(textsOf(root, "[aria-selected=true] .cell:first-child")).toEqual(["call 1"]);
  expect(root.querySelector(".table-detail")!.textContent).toContain("more on 1");
  press(root, "Enter");
  expect(route.value.params.m).toBe("a");
  press(root, "Escape");
  expect(root.querySelector(".table-detail")).toBeNull();
});

test("a table without rows shows a sentence", () => {
  expect(renderTable({ ...props, numRows: 0 }).textContent).toBe("No calls were recorded.");
});
