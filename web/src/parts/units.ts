/** Formats numbers exactly like Python's report/model/units.py. */

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const FLOPS = ["", "k", "M", "G", "T", "P", "E"];
const TIMES: readonly [string, number][] = [
  ["ns", 1],
  ["µs", 1e3],
  ["ms", 1e6],
  ["s", 1e9],
];

/** Like Python's `:.1f`: halves are rounded to the even digit, unlike `toFixed`. */
export function toFixed(value: number, digits: number): string {
  const size = Math.abs(value);
  // Only odd multiples of 1 / 2^(digits + 1) are exactly between two decimals.
  const isHalf = (size * 2 ** (digits + 1)) % 2 === 1;
  if (!isHalf) return value.toFixed(digits);
  const below = Math.floor(size * 10 ** digits);
  const even = (below + (below % 2)) / 10 ** digits;
  return (value < 0 ? "-" : "") + even.toFixed(digits);
}

function groupThousands(digits: string): string {
  return digits.replace(/\B(?=(\d{3})+$)/g, ",");
}

function formatDigits(value: number, unit: string): string {
  if (unit === "B" || value >= 99.95) return `${toFixed(value, 0)} ${unit}`;
  return `${toFixed(value, value >= 9.995 ? 1 : 2)} ${unit}`;
}

/** `0 B`, `512 B`, `1.50 KiB`, `12.3 MiB`, `224 GiB`. */
export function formatBytes(numBytes: number): string {
  let value = numBytes;
  for (const unit of BYTES.slice(0, -1)) {
    if (Math.abs(value) < 999.5) return formatDigits(value, unit);
    value /= 1024;
  }
  return formatDigits(value, BYTES.at(-1)!);
}

/** `0 ns`, `950 ns`, `1.50 µs`, `12.3 ms`, `100 s`, `86,400 s`. */
export function formatDuration(ns: number): string {
  const timeUnit = TIMES.find(([, size]) => ns < 999.5 * size) ?? TIMES.at(-1)!;
  return ns === 0 ? "0 ns" : formatTime(ns / timeUnit[1], timeUnit[0]);
}

function formatTime(value: number, unit: string): string {
  if (unit === "ns" || value >= 99.95) return `${groupThousands(toFixed(value, 0))} ${unit}`;
  return `${toFixed(value, value >= 9.995 ? 1 : 2)} ${unit}`;
}

/** `0 FLOP`, `512 FLOP`, `1.50 GFLOP`, `240 TFLOP`. */
export function formatFlops(flops: number): string {
  let value = flops;
  for (const unit of FLOPS.slice(0, -1)) {
    if (value < 999.5) {
      return unit ? formatDigits(value, `${unit}FLOP`) : `${toFixed(value, 0)} FLOP`;
    }
    value /= 1000;
  }
  return formatDigits(value, `${FLOPS.at(-1)}FLOP`);
}

/** With thousands separators; zero is a dot, so that other figures stand out. */
export function formatCount(count: number): string {
  return count ? groupThousands(String(count)) : "·";
}

/** A number in a sentence: `0`, `1,024`. */
export function formatNumber(count: number): string {
  return groupThousands(String(count));
}

/** Bytes in a table; zero is a dot. */
export function formatBytesCell(numBytes: number): string {
  return numBytes ? formatBytes(numBytes) : "·";
}

/** A difference of bytes with its sign: `+1.50 KiB`, `−12.3 MiB`; none is a dot. */
export function formatBytesChange(change: number): string {
  if (!change) return "·";
  return `${change > 0 ? "+" : "−"}${formatBytes(Math.abs(change))}`;
}

/** `12%`, `<1%`; zero of zero is `0%`. */
export function formatShare(part: number, total: number): string {
  if (!part || !total) return "0%";
  const percent = (100 * part) / total;
  return percent < 1 ? "<1%" : `${toFixed(percent, 0)}%`;
}

/** `1 finding`, `3 findings`. */
export function pluralize(count: number, noun: string, plural = `${noun}s`): string {
  return `${formatNumber(count)} ${count === 1 ? noun : plural}`;
}
