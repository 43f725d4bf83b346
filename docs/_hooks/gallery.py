"""Makes the gallery: a page with pictures, and the report of each recording in examples/gallery."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from shardscope.record import Recording, load
from shardscope.record.units import format_bytes
from shardscope.report.model.traffic_totals import fold_ranks
from shardscope.report.text.heading import describe_traffic

_TEXTS = {
    "llama3_8b": (
        "Llama 3 8B on 8 GPUs",
        "FSDP2, bf16, activation checkpointing of every layer, 2 × 8,192 tokens per GPU.",
    ),
    "llama3_405b": (
        "Llama 3 405B on 512 GPUs",
        "FSDP2 over 64 ranks, tensor and sequence parallelism over 8, bf16, activation "
        "checkpointing of every layer, 8,192 tokens per tensor-parallel group.",
    ),
    "deepseek_v3": (
        "DeepSeek-V3 on 512 GPUs",
        "Experts over 64 ranks by all-to-all, hybrid sharding of all other parameters, bf16, "
        "4,096 tokens per GPU.",
    ),
    "vit": (
        "ViT-B/16 with DDP on 8 GPUs",
        "Two steps with 64 images per GPU: DDP lays out its buckets after the first.",
    ),
}
_INTRODUCTION = """\
# Gallery

Reports as `shardscope report` writes them: open one, and use it. The models are files of about
100 lines in `examples/gallery`; sizes are the published ones, and no weights are needed. Each was
recorded as one rank of a simulated cluster on a CPU. `make gallery` makes all of them again.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page and the reports."""
    folder = Path(config.config_file_path).parent / "examples" / "gallery" / "recordings"
    recordings = {name: load(folder / f"{name}.json.gz") for name in _TEXTS}
    for name, recording in recordings.items():
        files.append(File.generated(config, f"gallery/{name}.html", content=recording.html()))
    files.append(File.generated(config, "gallery.md", content=render_page(recordings)))
    return files


def render_page(recordings: dict[str, Recording]) -> str:
    """The page: a section for each report."""
    return "\n".join([_INTRODUCTION, *(_render(name, recordings[name]) for name in recordings)])


def _render(name: str, recording: Recording) -> str:
    title, text = _TEXTS[name]
    report = f"gallery/{name}.html"
    peaks = [profile.peak_bytes for profile in recording.memory]
    peak = f" Peak of memory: {format_bytes(max(peaks))}." if peaks else ""
    traffic = describe_traffic(recording, fold_ranks(recording)).plain
    return f"""
## {title}

[![Overview of the report](assets/gallery/{name}.png)]({report})

{text} {traffic}.{peak} [Open the report]({report}).

```sh
{recording.run.command}
```
"""
