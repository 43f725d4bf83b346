import { beforeEach, expect, test } from "vitest";
import { makePage } from "./empty_page";
import { page } from "./page";
import { navigate } from "./route";
import {
  containsWords,
  search,
  searchError,
  searchedPattern,
  setSearch,
  splitMatches,
  words,
} from "./search";

beforeEach(() => {
  page.value = makePage({
    modules: { path: ["", "layers", "layers.0", "layers.0.attn"] },
  });
  navigate({ view: "modules", params: {} });
});

function find(text: string, ...candidates: string[]): string[] {
  setSearch(text);
  return candidates.filter((candidate) => containsWords(candidate, words.value));
}

test("words occur in any order and case", () => {
  expect(find("WO layers.3", "layers.3.attn.wo", "layers.3.attn.wq")).toEqual(["layers.3.attn.wo"]);
});

test("an anchor of an expression is of a name or of the whole row", () => {
  const rows = ["layers.0.attn.wq Linear", "layers.0.attn.wq.lora Linear", "wk, all_gather"];
  expect(find("/attn.*w[qk]$/", ...rows)).toEqual([rows[0]]);
  expect(find("/^(wk|linear)$/", ...rows)).toEqual(rows);
  expect(find("/attn.* linear$/", ...rows)).toEqual(rows.slice(0, 2));
});

test("a module pattern matches names and what is inside them", () => {
  const names = ["layers.3.attn", "layers.3.attn.wq all_gather", "layers.attn", "all_gather[tp]"];
  expect(find("layers.*.attn", ...names)).toEqual(names.slice(0, 2));
  expect(find("layers.[0-2].**", ...names)).toEqual([]);
  expect(find("all_gather[tp]", ...names)).toEqual(["all_gather[tp]"]);
  expect(splitMatches("in layers.3.attn, why", ["layers.*.attn"])).toEqual([
    "in ",
    "layers.3.attn",
    ", why",
  ]);
});

test("a regular expression is between slashes", () => {
  const names = ["layers.3.attn", "layers.3.mlp w1", "embed"];
  expect(find("/attn|mlp w\\d/", ...names)).toEqual(names.slice(0, 2));
  expect(splitMatches("a attn b", words.value)).toEqual(["a ", "attn", " b"]);
  expect(splitMatches("aXb", ["/(x)|y*/"])).toEqual(["a", "X", "b"]);
  expect(find("/home/ada", "/home/ada/train.py")).toEqual(["/home/ada/train.py"]);
});

test("an expression that is not valid is reported and filters nothing", () => {
  expect(find("/attn|(/", "embed")).toEqual(["embed"]);
  expect(searchError.value).toMatch(
    /^\/attn\|\(\/ is not a regular expression: .+\. All rows are shown\.$/,
  );
  setSearch("/attn/");
  expect(searchError.value).toBe("");
});

test("a pattern that matches modules can be selected", () => {
  for (const [text, pattern] of [
    ["layers.*", "layers.*"],
    ["layers.*.mlp", ""],
    ["layers", ""],
    ["layers.* attn", ""],
    ["/layers.*/", ""],
  ]) {
    setSearch(text!);
    expect(searchedPattern.value).toBe(pattern);
  }
  setSearch("");
  expect(search.value).toBe("");
});
