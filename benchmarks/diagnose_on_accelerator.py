"""Diagnoses inductor on an accelerator: a model that is right, and faults that torch can inject.

Run it on a machine with a GPU: python benchmarks/diagnose_on_accelerator.py
"""

from __future__ import annotations

import tempfile
import time

import torch
from torch import nn
from torch._inductor import config

from shardscope import diagnose
from shardscope.report.text.summary import render_text

_FAULTS = ("", "accuracy", "compile_error", "runtime_error")


def make_model() -> nn.Module:
    layers = [nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 8)).to("cuda")


def main() -> None:
    torch.manual_seed(0)
    model, batch = make_model(), torch.randn(32, 64, device="cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for fault in _FAULTS:
        began = time.monotonic()
        patched = config.patch({"triton.inject_relu_bug_TESTING_ONLY": fault or None})
        with patched, tempfile.TemporaryDirectory() as folder:
            found = diagnose(model, batch, backend="inductor", folder=folder, name=fault or "fine")
        print(f"\n=== {fault or 'no fault'}: {time.monotonic() - began:.1f} s")
        print(render_text(found.recording, width=120))


if __name__ == "__main__":
    main()
