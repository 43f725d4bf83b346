import { expect, test } from "vitest";
import { changeRoute, formatRoute, parseRoute } from "./route";

test.each([
  "#/overview",
  "#/modules?m=layers.0.attn",
  "#/modules?m=a%26b%3D%23%2F%3F+%22%3Cx%3E&q=%C3%A9+%F0%9F%A6%99",
])("an address is unchanged by parsing and formatting: %s", (hash) => {
  expect(formatRoute(parseRoute(hash))).toBe(hash);
});

test("the overview is shown without an address", () => {
  expect(parseRoute("")).toEqual({ view: "overview", params: {} });
});

test("only selection, search and theme stay when the view changes", () => {
  const from = parseRoute("#/modules?by=memory&m=layers&q=attn&theme=dark");
  expect(formatRoute(changeRoute(from, "sharding"))).toBe("#/sharding?m=layers&q=attn&theme=dark");
  expect(formatRoute(changeRoute(from, "modules", { m: null }))).toBe(
    "#/modules?by=memory&q=attn&theme=dark",
  );
});

test("the root, whose path is empty, can be selected", () => {
  expect(parseRoute("#/modules?m=").params).toEqual({ m: "" });
});
