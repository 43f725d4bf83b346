"""Lets this process and those that it starts write to some folders only.

This needs Linux 5.13 with Landlock, and no privileges. Files that are open already can be written.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls, on all architectures
_GET_VERSION = 1
_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38
# Bits of access rights: write, remove and make all kinds of files; later versions have more.
_WRITE = 1 << 1 | sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14


def forbid_writes(apart_from: Iterable[str]) -> bool:
    """Forbid this process to write outside of some folders, for ever; whether that was possible."""
    call = getattr(ctypes.CDLL(None), "syscall", None)
    if call is None:
        return False
    call.restype = ctypes.c_long
    version = call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_GET_VERSION))
    if version < 1:
        return False
    rights = _WRITE | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    attributes = struct.pack("=Q", rights)
    rules = call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if rules < 0:
        return False
    try:
        for folder in apart_from:
            descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", rights, descriptor)
            call(_ADD_RULE, rules, _PATH_BENEATH, rule, ctypes.c_uint32(0))
            os.close(descriptor)
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return bool(call(_RESTRICT_SELF, rules, ctypes.c_uint32(0)) == 0)
    finally:
        os.close(rules)
