/** Writes a hash of the bundle's sources, which Python compares without Node (tests/report/test_bundle.py). */
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";
import type { Plugin } from "vite";

const ROOT = import.meta.dirname;
const CONFIG_FILES = [
  "package.json",
  "package-lock.json",
  "tsconfig.json",
  "vite.config.ts",
  "sources_hash.ts",
];

function listFiles(folder: string): string[] {
  return readdirSync(join(ROOT, folder)).flatMap((name) => {
    const path = `${folder}/${name}`;
    return statSync(join(ROOT, path)).isDirectory() ? listFiles(path) : [path];
  });
}

/** Tests are left out: they do not change the bundle. */
function isShipped(path: string): boolean {
  return !/\.test\.tsx?$|\.cases\.json$/.test(path);
}

export function hashSources(): string {
  const hash = createHash("sha256");
  for (const path of [...CONFIG_FILES, ...listFiles("src").filter(isShipped)].sort()) {
    const bytes = readFileSync(join(ROOT, path));
    hash.update(`${path} ${bytes.length}\n`).update(bytes);
  }
  return hash.digest("hex");
}

export function writeSourcesHash(): Plugin {
  let outDir = "";
  return {
    name: "sources-hash",
    apply: "build",
    configResolved(config) {
      outDir = resolve(config.root, config.build.outDir);
    },
    closeBundle() {
      writeFileSync(join(outDir, "sources.sha256"), `${hashSources()}\n`);
    },
  };
}
