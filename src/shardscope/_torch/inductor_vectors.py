"""Which vector instructions work: inductor compiles a program for each before its first kernel."""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

__all__ = ["try_vector_instructions"]


def try_vector_instructions() -> None:
    """Try all at once that inductor would try one after the other; it remembers what they said."""
    if platform.machine() != "x86_64":  # elsewhere it knows without a trial
        return
    with suppress(Exception):  # it finds out by itself, and is only slower
        from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker

        known = x86_isa_checker()
        tried = [one for one in supported_vec_isa_list if set(str(one).split()) <= set(known)]
        with ThreadPoolExecutor() as pool:
            list(pool.map(bool, tried))
