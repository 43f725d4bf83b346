/** The columns of the audit table; columns without values are left out. */
import type { Parameters } from "../../page";
import { Badge } from "../../parts/badge";
import { Highlight } from "../../parts/highlight";
import type { Column } from "../../parts/table";
import { formatBytes } from "../../parts/units";

export function makeColumns(parameters: Parameters): Column[] {
  const text = (
    id: string,
    title: string,
    width: number,
    column: readonly string[],
    hint?: string,
  ): Column => ({
    id,
    title,
    hint,
    width,
    isText: true,
    value: (row) => column[row]!,
  });
  const columns: (Column | false)[] = [
    {
      ...text("name", "Name", 16, parameters.name),
      isNeverCut: true,
      cell: (row) => (
        <span class="clip mono" title={parameters.name[row]}>
          <Highlight text={parameters.name[row]!} />
          {parameters.is_buffer[row] && <span class="dim"> buffer</span>}
        </span>
      ),
    },
    hasAny(parameters.flags) && {
      ...text("flags", "Findings", 10, parameters.flags, "rules of the audit"),
      grow: 2,
      cell: (row) => <Flags flags={parameters.flags[row]!} />,
    },
    { ...text("placement", "Placement", 12, parameters.placement), grow: 1, isNeverCut: true },
    { ...text("shape", "Shape", 7, parameters.shape), isNeverCut: true },
    {
      ...text("local", "On a rank", 7, parameters.local_shape, "the shape that one rank holds"),
      isNeverCut: true,
    },
    { ...text("dtype", "Dtype", 5.5, parameters.dtype), isNeverCut: true },
    {
      id: "bytes",
      title: "Bytes",
      hint: "of the global parameter",
      width: 6.5,
      align: "end",
      value: (row) => parameters.global_bytes[row] ?? -1,
      cell: (row) => formatOptionalBytes(parameters.global_bytes[row]),
    },
    {
      id: "held",
      title: "Held",
      hint: "bytes of it on one rank",
      width: 6.5,
      align: "end",
      value: (row) => parameters.local_bytes[row] ?? -1,
      cell: (row) => formatOptionalBytes(parameters.local_bytes[row]),
    },
    hasAny(parameters.rule) && {
      ...text("rule", "Rule", 9, parameters.rule, "of the plan that placed it"),
      isNeverCut: true,
    },
    hasAny(parameters.fsdp_group) && {
      ...text("fsdp", "FSDP group", 8, parameters.fsdp_group, "the module that gathers it"),
      isNeverCut: true,
    },
    hasAny(parameters.alias_group) && {
      ...text("tie", "Tied as", 7, parameters.alias_group, "those with the same are one tensor"),
      grow: 1,
    },
  ];
  return columns.filter((column) => column !== false);
}

/** Bytes, or a dash where they were not recorded. */
function formatOptionalBytes(numBytes: number | null | undefined): string {
  return numBytes == null ? "–" : formatBytes(numBytes);
}

function hasAny(column: readonly string[]): boolean {
  return column.some(Boolean);
}

export function Flags({ flags }: { flags: string }) {
  if (!flags) return null;
  return (
    <span class="flags">
      {flags.split(", ").map((flag) => (
        <Badge key={flag} word={flag} tone="warn" />
      ))}
    </span>
  );
}
