"""Pages for tests of the browser, made by hand: a Llama on 1,024 ranks, and stranger things."""

from __future__ import annotations

from shardscope.record import Axis
from shardscope.report.html.page import (
    Communication,
    Fact,
    FindingItem,
    GapItem,
    Page,
    RankRow,
    RunFacts,
    Sources,
    Traffic,
)
from shardscope.report.html.page_modules import Modules

MIB = 1 << 20

# A module's label and type, what one rank sends for it alone, its own parameters, its children.
Node = tuple[str, str, int, int, list["Node"]]


def make_page(num_layers: int = 32) -> Page:
    """A Llama under FSDP2 and tensor parallelism, with findings, gaps and lines."""
    tree: Node = ("", "Llama", 750, 0, [*_make_ends(), _make_layers(num_layers)])
    modules = lay_out(tree)
    where = {path: position for position, path in enumerate(modules.path)}
    return Page(
        run=_make_run(),
        facts=_make_facts(),
        findings=_make_findings(where, num_layers),
        gaps=(
            GapItem(place="aten.frobnicate", fact="an op that no shim knows issued a collective"),
            GapItem(place="stream", fact="the file ends midway", ranks="rank 17", is_loss=True),
        ),
        sources=Sources(
            file=("/home/ada/train/models/llama/attention.py", "train.py"),
            line=(121, 272),
            function=("Attention.forward", "compute_gradients"),
            text=("return self.wo(output.view(batch, length, -1))", "loss.backward()"),
        ),
        modules=modules,
        communication=make_communication(tree),
    )


def _make_run() -> RunFacts:
    return RunFacts(
        title="Llama 8B",
        mesh=(Axis(name="dp", size=128), Axis(name="tp", size=8)),
        world_size=1024,
        ranks="rank 0 of 1,024",
        world="simulated",
        torch_version="2.13.0+cpu",
        shardscope_version="0.6.0",
        command="shardscope trace train.py --mesh dp=128,tp=8 -o llama.json",
        instruments=("trace", "audit", "memory"),
        checks="checked by: trace, audit, memory; not run: coverage",
        no_gaps="No gaps: every collective was attributed.",
        scope="rank 0 of 1,024, simulated",
        num_forwards=1,
    )


def _make_facts() -> tuple[Fact, ...]:
    return (
        Fact(label="Collectives", value="428", note="per rank and step", view="communication"),
        Fact(label="On the wire", value="21.4 GiB", note="per rank, rings", view="communication"),
        Fact(label="Parameters", value="8.03 B", note="59.8 MiB on a rank", view="sharding"),
        Fact(label="Peak memory", value="31.7 GiB", note="in backward", view="memory"),
        Fact(label="Graph breaks", value="2", note="in 3 graphs", view="compiler"),
        Fact(label="Ops that shard", value="61 of 64", note="2 have no rule", view="coverage"),
    )


def _make_findings(where: dict[str, int], num_layers: int) -> tuple[FindingItem, ...]:
    return (
        FindingItem(
            rule="implicit-redistribute",
            severity="error",
            subject="layers.{0…31}.attention.wo",
            fact="DTensor gathers its input, 112 MiB a layer, which no plan asks for.",
            remedy="Give wo RowwiseParallel with input_layouts=Shard(-1).",
            ranks="all ranks",
            count=num_layers,
            module=where["layers.0.attention.wo"],
            modules=tuple(where[f"layers.{layer}.attention.wo"] for layer in range(num_layers)),
            source=0,
        ),
        FindingItem(
            rule="replicated-parameter",
            severity="warning",
            subject="tok_embeddings",
            fact="Each of 8 tp ranks holds all of 1.00 GiB.",
            remedy="Shard it along tp with RowwiseParallel, or leave it if it is tied.",
            module=where["tok_embeddings"],
            modules=(where["tok_embeddings"],),
        ),
        FindingItem(
            rule="uneven-shards",
            severity="info",
            subject="output",
            fact="128,257 rows do not divide by 8: the last rank holds 7 fewer.",
            remedy="Pad the vocabulary to a multiple of 8.",
            module=where["output"],
            modules=(where["output"],),
            source=1,
        ),
    )


def _make_ends() -> list[Node]:
    return [
        ("tok_embeddings", "Embedding", 112, 525_336_576, []),
        ("norm", "RMSNorm", 0, 4096, []),
        ("output", "Linear", 112, 525_336_576, []),
    ]


def _make_layers(num_layers: int) -> Node:
    def linear(name: str, said: int, size: int) -> Node:
        return (name, "Linear", said, size, [])

    square, wide = 4096 * 4096, 4096 * 14336
    attention = [linear("wq", 0, square), linear("wk", 0, square // 4)]
    attention += [linear("wv", 0, square // 4), linear("wo", 112, square)]
    forward = [linear("w1", 0, wide), linear("w2", 112, wide), linear("w3", 0, wide)]
    layer: list[Node] = [
        ("attention_norm", "RMSNorm", 0, 4096, []),
        ("attention", "Attention", 112, 0, attention),
        ("ffn_norm", "RMSNorm", 0, 4096, []),
        ("feed_forward", "FeedForward", 112, 0, forward),
    ]
    return (
        "layers",
        "ModuleList",
        0,
        0,
        [(str(i), "Block", 206, 0, layer) for i in range(num_layers)],
    )


def lay_out(root: Node) -> Modules:
    """Columns of a tree; siblings whose names are numbers are identical."""
    rows: list[tuple[str, str, str, int, int, int, int]] = []
    ends: dict[int, int] = {}
    totals: dict[int, int] = {}

    def walk(node: Node, parent: int, path: str) -> int:
        label, kind, said, size, children = node
        position = len(rows)
        first = next((i for i in range(position) if rows[i][3] == parent), position)
        first_identical = first if label.isdigit() else position
        rows.append((path, label or kind, kind, parent, first_identical, said * MIB, size))
        below = [walk(child, position, f"{path}.{child[0]}".lstrip(".")) for child in children]
        ends[position] = len(rows)
        totals[position] = size + sum(below)
        return totals[position]

    walk(root, -1, "")
    positions = range(len(rows))
    path, label, kind, parent, first_identical, _, _ = zip(*rows, strict=True)
    sizes = tuple(totals[i] for i in positions)
    return Modules(
        path=path,
        label=label,
        type=kind,
        parent=parent,
        end=tuple(ends[i] for i in positions),
        first_identical=first_identical,
        repeat=tuple(first_identical.count(i) or 1 for i in positions),
        total_parameters=sizes,
        total_parameter_bytes=tuple(4 * one for one in sizes),
        total_local_bytes=tuple(4 * one // 1024 for one in sizes),
        total_peak_bytes=tuple(4 * one // 128 for one in sizes),
        marks=tuple("fully_shard" if one == "Block" else "" for one in kind),
        num_findings=_count_findings(path),
    )


def make_communication(root: Node) -> Communication:
    """Rows of what each module of a tree sends itself, a third of it in forward."""
    sent = [said * MIB for said in _list_sent(root)]
    rows = [
        (owner, phase, num_bytes)
        for owner, total in enumerate(sent)
        if total
        for phase, num_bytes in enumerate((total // 3, total - total // 3))
    ]
    zeros = (0,) * len(rows)
    num_bytes = tuple(row[2] for row in rows)
    return Communication(
        axes=("tp",),
        kinds=("all_gather",),
        phases=("forward", "backward"),
        causes=("FSDP unshard",),
        dtypes=("bfloat16",),
        groups=(),
        ranks=(RankRow(ranks="0", example=0, num_ranks=1),),
        traffic=Traffic(
            **dict.fromkeys(("rank_set", "axis", "kind", "cause", "dtype"), zeros),
            phase=tuple(row[1] for row in rows),
            owner=tuple(row[0] for row in rows),
            source=(-1,) * len(rows),
            count=(1,) * len(rows),
            input_bytes=num_bytes,
            wire_bytes=num_bytes,
        ),
    )


def _list_sent(node: Node) -> list[int]:
    """What each module sends itself, in the order of `lay_out`."""
    return [node[2], *(sent for child in node[4] for sent in _list_sent(child))]


def _count_findings(paths: tuple[str, ...]) -> tuple[int, ...]:
    found = [one for one in paths if one in {"tok_embeddings", "output", "layers.0.attention.wo"}]
    return tuple(
        sum(one == path or one.startswith(f"{path}.".lstrip(".")) for one in found)
        for path in paths
    )
