// @vitest-environment happy-dom
import { afterEach, expect, test, vi } from "vitest";
import { chooseEditor, EDITORS, editorChoice, editorHref, resolvePath } from "./editor";

afterEach(() => vi.restoreAllMocks());

test.each([
  ["vscode", "vscode://file/home/a%20b/models/llama.py:12"],
  ["cursor", "cursor://file/home/a%20b/models/llama.py:12"],
  ["idea", "idea://open?file=%2Fhome%2Fa%20b%2Fmodels%2Fllama.py&line=12"],
  ["pycharm", "pycharm://open?file=%2Fhome%2Fa%20b%2Fmodels%2Fllama.py&line=12"],
])("a relative path is opened in %s below the root", (editor, href) => {
  expect(editorHref("models/llama.py", 12, { editor, root: "/home/a b/" })).toBe(href);
});

test("an absolute path needs no root, and one of Windows gets a slash", () => {
  expect(resolvePath("/srv/train.py", "")).toBe("/srv/train.py");
  expect(resolvePath("C:\\work\\train.py", "")).toBe("/C:/work/train.py");
  expect(resolvePath("train.py", "D:\\work")).toBe("/D:/work/train.py");
  expect(resolvePath("train.py", "")).toBe(null);
  expect(resolvePath("train.py", "work")).toBe(null);
  expect(resolvePath("<stdin>", "/work")).toBe(null);
  expect(editorHref("train.py", 1, { editor: "emacs", root: "/work" })).toBe(null);
});

test.each([
  "javascript:alert(1)",
  "/javascript:alert(1)//",
  'x" onclick="alert(1)',
  "data:text/html,<script>alert(1)</script>",
  "a?b#c&d\u0000e",
  "//evil.example/x",
])("a hostile file name stays a path of the editor's link: %s", (file) => {
  for (const { id } of EDITORS) {
    const href = editorHref(file, Number.NaN, { editor: id, root: "/work" })!;
    const url = new URL(href);
    expect(url.protocol).toBe(`${id}:`);
    expect(url.hash).toBe("");
    expect(href).toMatch(/^[!#-;=?-~]+$/); // printable, without quotes and angle brackets
    expect([...url.searchParams.keys()]).toEqual(href.includes("?") ? ["file", "line"] : []);
  }
});

test("without storage the choice lasts as long as the page", () => {
  vi.spyOn(Storage.prototype, "setItem").mockImplementation(() => {
    throw new Error("blocked");
  });
  chooseEditor({ editor: "cursor", root: "/work" });
  expect(editorChoice.value.editor).toBe("cursor");
  expect(editorHref("a.py", 3)).toBe("cursor://file/work/a.py:3");
});
