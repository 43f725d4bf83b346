/** Table of tensors compared with the single device; those that differ come first. */
import { useCallback, useMemo } from "preact/hooks";
import type { TensorTable } from "../../page";
import { Badge } from "../../parts/badge";
import { FacetLink } from "../../parts/facet_link";
import { ModuleLink } from "../../parts/module_link";
import { type Column, Table } from "../../parts/table";
import { firstRank } from "../../store/ranks";
import { route } from "../../store/route";
import { isTensorSelected } from "./selected_rows";

interface Props {
  readonly tensors: TensorTable;
  readonly label: string;
  readonly isBad: boolean; // whether only those that differ are shown
}

export function ComparedTensors({ tensors, label, isBad }: Props) {
  const columns = useMemo(() => makeColumns(tensors), [tensors]);
  const { params } = route.value;
  const isShown = useCallback(
    (row: number) => (!isBad || !tensors.is_fine[row]) && isTensorSelected(tensors, row),
    [tensors, isBad, params],
  );
  const moduleOf = useCallback((row: number) => tensors.module[row]!, [tensors]);
  return (
    <Table
      label={label}
      numRows={tensors.name.length}
      columns={columns}
      isShown={isShown}
      modules={moduleOf}
      empty="No tensors were compared."
      height="30rem"
      detail={(row) => <ComparedTensor tensors={tensors} row={row} />}
    />
  );
}

function formatError(value: number | null | undefined): string {
  return value === null || value === undefined ? "" : value === 0 ? "0" : value.toExponential(1);
}

function makeColumns(tensors: TensorTable): Column[] {
  const { name, kind, agreement, error, noise, suspect, detail, ranks } = tensors;
  const words = (id: string, title: string, width: number, texts: readonly string[]): Column => ({
    id,
    title,
    width,
    grow: id === "detail" ? 4 : 1,
    isText: true,
    value: (row) => texts[row]!,
  });
  const hasAny = (texts: readonly string[]): boolean => texts.some((text) => text !== "");
  return [
    { id: "name", title: "Tensor", width: 13, grow: 3, value: (row) => name[row]! },
    {
      id: "kind",
      title: "Kind",
      width: 7,
      isNeverCut: true,
      value: (row) => kind[row]!.replaceAll("_", " "),
    },
    {
      id: "agreement",
      title: "Verdict",
      narrowPlace: 1,
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
    ...(hasAny(suspect) ? [words("suspect", "Likely cause", 11, suspect)] : []),
    ...(hasAny(ranks) ? [makeRankColumn(ranks)] : []),
    ...(hasAny(detail) ? [{ ...words("detail", "Detail", 14, detail), isNeverCut: true }] : []),
  ];
}

/** The ranks that differ; a click selects the first of them. */
function makeRankColumn(ranks: readonly string[]): Column {
  return {
    id: "ranks",
    title: "Ranks",
    width: 6,
    grow: 1,
    isText: true,
    value: (row) => ranks[row]!,
    cell: (row) =>
      ranks[row] && (
        <FacetLink facet="rank" value={firstRank(ranks[row])}>
          {ranks[row]}
        </FacetLink>
      ),
  };
}

function ComparedTensor({ tensors, row }: { tensors: TensorTable; row: number }) {
  return (
    <div class="stack">
      <p>
        <code class="wrap">{tensors.name[row]}</code>{" "}
        <span class="dim">{tensors.kind[row]!.replaceAll("_", " ")}</span>
      </p>
      {tensors.module[row]! >= 0 && (
        <p>
          of <ModuleLink module={tensors.module[row]!} />
        </p>
      )}
      <p class="wrap">{tensors.detail[row] || "It is equal up to noise."}</p>
    </div>
  );
}
