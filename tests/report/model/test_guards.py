"""Guards as torch writes them, in words."""

from __future__ import annotations

import pytest

from shardscope.report.model.guards import GuardKind, describe_guard

_TENSOR = (
    "check_tensor(self._modules['layers']._modules['0']._parameters['weight'], Parameter, "
    "DispatchKeySet(CUDA, AutogradCUDA), torch.bfloat16, device=0, requires_grad=False, "
    "size=[4, None], stride=[None, 1])"
)


@pytest.mark.parametrize(
    ("guard", "kind", "subject", "condition"),
    [
        (
            _TENSOR,
            GuardKind.TENSOR,
            "self.layers[0].weight",
            "Parameter of bfloat16[4, ?], strides [?, 1], on device 0, requires no gradient",
        ),
        ("mode == 'a == b'", GuardKind.VALUE, "mode", "equals 'a == b'"),
        ("x is None", GuardKind.VALUE, "x", "is None"),
        ("len(xs) == 3", GuardKind.SIZE, "xs", "has 3 items"),
        ("2 <= x.size()[0]", GuardKind.SIZE, "x.size()[0]", "2 <= this size"),
        ("not ___dict_contains('k', d)", GuardKind.KEY, "d", "has no key 'k'"),
        (
            "___check_type_id(self), type=<class 'net.Net'>",
            GuardKind.TYPE,
            "self",
            "is a net.Net",
        ),
        ("check_no_aliasing(h, x)", GuardKind.TENSOR, "h, x", "are different tensors that share"),
        ("___check_global_state() against {}", GuardKind.STATE, "", "grad mode, autocast"),
        ("something {new}", GuardKind.OTHER, "", "something {new}"),
    ],
)
def test_guards_are_described_and_unknown_forms_are_kept(guard, kind, subject, condition) -> None:
    fact = describe_guard(guard)
    assert (fact.kind, fact.subject) == (kind, subject)
    assert fact.condition.startswith(condition)
