/** Table of tensors compared with the single device; those that differ come first. */
import { useCallback, useMemo } from "preact/hooks";
import type { VerdictTable } from "../../page";
import { Badge } from "../../parts/badge";
import { type Column, Table } from "../../parts/table";

export function Verdicts({ tensors, isBad }: { tensors: VerdictTable; isBad: boolean }) {
  const columns = useMemo(() => makeColumns(tensors), [tensors]);
  const isShown = useCallback((row: number) => !isBad || !tensors.is_fine[row], [tensors, isBad]);
  return (
    <Table
      label="compared tensors"
      numRows={tensors.name.length}
      columns={columns}
      isShown={isShown}
      empty="No tensors were compared."
      height="30rem"
      detail={(row) => <Verdict tensors={tensors} row={row} />}
    />
  );
}

function formatError(value: number | null | undefined): string {
  return value === null || value === undefined ? "" : value === 0 ? "0" : value.toExponential(1);
}

function makeColumns(tensors: VerdictTable): Column[] {
  const { name, kind, agreement, error, noise, suspect, detail, ranks } = tensors;
  return [
    { id: "name", title: "Tensor", width: 13, grow: 3, value: (row) => name[row]! },
    { id: "kind", title: "Kind", width: 7, value: (row) => kind[row]!.replaceAll("_", " ") },
    {
      id: "agreement",
      title: "Verdict",
      width: 10,
      value: (row) => agreement[row]!,
      cell: (row) => (
        <Badge word={agreement[row]!} tone={tensors.is_fine[row] ? "good" : undefined} />
      ),
    },
    {
      id: "error",
      title: "Error",
      hint: "root mean square error, relative to the exact result",
      width: 6,
      align: "end",
      value: (row) => error[row] ?? null,
      cell: (row) => formatError(error[row]),
    },
    {
      id: "noise",
      title: "Noise",
      hint: "the same for a single device",
      width: 6,
      align: "end",
      value: (row) => noise[row] ?? null,
      cell: (row) => formatError(noise[row]),
    },
    {
      id: "suspect",
      title: "Likely cause",
      width: 9,
      grow: 1,
      value: (row) => suspect[row]!.replaceAll("_", " "),
    },
    { id: "ranks", title: "Ranks", width: 5, grow: 1, value: (row) => ranks[row]! },
    { id: "detail", title: "Detail", width: 12, grow: 3, value: (row) => detail[row]! },
  ];
}

function Verdict({ tensors, row }: { tensors: VerdictTable; row: number }) {
  return (
    <div class="stack">
      <code class="wrap">{tensors.name[row]}</code>
      <p class="wrap">{tensors.detail[row] || "It is equal up to noise."}</p>
    </div>
  );
}
