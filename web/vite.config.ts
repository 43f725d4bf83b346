/** Builds one script and one style sheet, the same bytes from the same sources. */
import { defineConfig } from "vitest/config";
import { writeSourcesHash } from "./sources_hash.ts";

export default defineConfig({
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  plugins: [writeSourcesHash()],
  build: {
    target: "es2022",
    outDir: "../src/shardscope/report/bundle",
    emptyOutDir: false,
    sourcemap: false,
    reportCompressedSize: false,
    lib: {
      entry: "src/main.tsx",
      name: "shardscope",
      formats: ["iife"],
      fileName: () => "app.js",
      cssFileName: "app",
    },
  },
  define: { "process.env.NODE_ENV": '"production"' },
  test: { include: ["src/**/*.test.{ts,tsx}"] },
});
