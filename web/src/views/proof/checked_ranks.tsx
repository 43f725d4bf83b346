/** Whether the ranks of a program would wait for each other forever, and what was tried. */
import { useCallback, useMemo } from "preact/hooks";
import type { RankCheckItem, VariationTable } from "../../page";
import { Badge, type Tone } from "../../parts/badge";
import { Panel } from "../../parts/panel";
import { SourceLine } from "../../parts/source_line";
import { type Column, Table } from "../../parts/table";
import { Unfollowed } from "../../parts/unfollowed";
import { formatLocation } from "../../store/selection";
import { FOLLOWED } from "./selected_rows";

const VERDICTS: Readonly<Record<string, readonly [string, Tone]>> = {
  error: ["ranks diverge", "bad"],
  warning: ["ranks may diverge", "warn"],
};

const OUTCOMES: Readonly<Record<string, readonly [string, Tone]>> = {
  same: ["same collectives", "good"],
  diverged: ["ranks diverge", "bad"],
  raised: ["raises", "info"],
  "not tried": ["not tried", "quiet"],
};

export function CheckedRanks({ item }: { item: RankCheckItem }) {
  const [word, tone] = VERDICTS[item.severity] ?? ["no rank diverges", "good"];
  return (
    <Panel title="Would its ranks wait for each other forever?" note={item.ranks}>
      <p class={tone === "bad" ? "proof-words proof-wrong" : "proof-words"}>
        <Badge word={word} tone={tone} />
        <span>{item.summary}</span>
      </p>
      {item.variations.condition.length > 0 && <Variations variations={item.variations} />}
    </Panel>
  );
}

function Variations({ variations }: { variations: VariationTable }) {
  const columns = useMemo(() => makeColumns(variations), [variations]);
  const sourceOf = useCallback((row: number) => variations.source[row]!, [variations]);
  const ranksOf = useCallback((row: number) => variations.ranks[row]!, [variations]);
  return (
    <section class="proof-table">
      <h3 class="detail-head">What some ranks alone were made to see</h3>
      <Unfollowed what="Variations" follows={FOLLOWED.variations} />
      <Table
        label="variations"
        numRows={variations.condition.length}
        columns={columns}
        sources={sourceOf}
        ranks={ranksOf}
        detail={(row) => <Variation variations={variations} row={row} />}
        empty="No variation was tried."
        height="30rem"
      />
    </section>
  );
}

function makeColumns({ condition, outcome, detail, ranks, source }: VariationTable): Column[] {
  return [
    {
      id: "condition",
      title: "If",
      width: 16,
      grow: 4,
      isText: true,
      value: (row) => condition[row]!,
    },
    {
      id: "outcome",
      title: "Then",
      narrowPlace: 1,
      width: 11,
      isText: true,
      value: (row) => outcome[row]!,
      cell: (row) => {
        const [word, tone] = OUTCOMES[outcome[row]!]!;
        return <Badge word={word} tone={tone} />;
      },
    },
    {
      id: "detail",
      title: "Detail",
      width: 10,
      grow: 3,
      isText: true,
      value: (row) => detail[row]!,
    },
    { id: "ranks", title: "Ranks", width: 6, grow: 1, isText: true, value: (row) => ranks[row]! },
    {
      id: "line",
      title: "Line",
      width: 8,
      grow: 1,
      isText: true,
      isNeverCut: true,
      value: (row) => formatLocation(source[row]!),
      cell: (row) => <SourceLine source={source[row]!} isShort />,
    },
  ];
}

function Variation({ variations, row }: { variations: VariationTable; row: number }) {
  return (
    <div class="stack">
      <p class="wrap">{`If ${variations.condition[row]!}.`}</p>
      {variations.detail[row] && <p class="wrap">{variations.detail[row]}</p>}
      <SourceLine source={variations.source[row]!} />
    </div>
  );
}
