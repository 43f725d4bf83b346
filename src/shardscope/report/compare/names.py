"""Names of modules that compare as the same whatever the model is wrapped in."""

from __future__ import annotations

from typing import final

from shardscope.record import Recording

__all__ = ["CleanNames"]

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_DATA_PARALLEL = "module"


@final
class CleanNames:
    """The names of one recording, without the parts that wrappers put into them."""

    def __init__(self, recording: Recording) -> None:
        self._clean: dict[str, str] = {}
        names = {one.name for one in recording.modules}
        names |= {call.owner for call in recording.collectives if call.owner}
        first_parts = {_unwrap(name).split(".")[0] for name in names}
        # A child may really be called `module`; DDP's is the only one, and all lie in it.
        self._is_data_parallel = first_parts - {""} == {_DATA_PARALLEL}
        self.names = tuple(sorted({self.clean(name) for name in names}))

    def clean(self, name: str) -> str:
        """The name of a module, parameter or buffer as the user's own model has it."""
        found = self._clean.get(name)
        if found is None:
            found = self._clean[name] = self._strip(name)
        return found

    def _strip(self, name: str) -> str:
        name = _unwrap(name)
        if not self._is_data_parallel or name == _DATA_PARALLEL:
            return "" if self._is_data_parallel else name
        return name.removeprefix(f"{_DATA_PARALLEL}.")


def _unwrap(name: str) -> str:
    if "_" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
