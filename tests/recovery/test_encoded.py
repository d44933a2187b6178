"""L: state groups held by codecs. Forward exact, gradients near, everything sensitive untouched, R from L exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ds_hilore.core.treatment import Treatment
from ds_hilore.core.types import Action
from ds_hilore.recovery.bundle import Kept
from ds_hilore.recovery.encoded import Encoded, LargestOf, Shelf
from ds_hilore.recovery.unit import UnitCall
from tests import models
from tests.recovery.plans import H, Host, R, adapted, differences, small_loss

ALL = ("attention_out", "attention_qk", "attention_v", "mlp", "residual")
#: Families whose MLPs have an activation of their own and whose attention is torch's.
DENSE = ("gemma3", "gpt_neox", "llama", "phi3", "qwen2")


def everything(codec: str) -> Treatment:
    return Treatment(Action.COMPRESS, codecs=tuple((group, codec) for group in ALL))


def _error(exact: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    square = sum(float((found[n] - g).double().square().sum()) for n, g in exact.items())
    return (square / sum(float(g.double().square().sum()) for g in exact.values())) ** 0.5


def looking(host: Host, look: Callable[[UnitCall], None]) -> Callable[[nn.Module], Tensor]:
    """The loss, with a look at every call between forward and backward."""

    def loss(model: nn.Module) -> Tensor:
        value = small_loss(model)
        for call in host.calls:
            look(call)
        return value

    return loss


@pytest.mark.parametrize("family", sorted(models.FAMILIES))
def test_errors_are_as_small_as_the_codec(family: str) -> None:
    host = Host(adapted(family, "lora"))
    exact = host.gradients(small_loss, None)
    errors = [_error(exact, host.gradients(small_loss, (everything(codec),))) for codec in ("bf16", "int8")]
    assert all(error < 0.05 for error in errors)
    if family in DENSE:
        assert all(error > 0 for error in errors), "nothing was encoded"


@pytest.mark.parametrize("family", DENSE)
def test_which_state_is_encoded(family: str) -> None:
    host = Host(adapted(family, "lora"))
    groups: set[str] = set()
    wrong: list[str] = []

    def look(call: UnitCall) -> None:
        groups.update(statistic.group for statistic in call.statistics)
        inputs = call.input_storages()
        for handle in call._alive():
            meta = call.metas[handle.index]
            if isinstance(handle.value, Encoded) and (meta is None or not meta.dtype.is_floating_point):
                wrong.append(f"slot {handle.index}")
            if isinstance(handle.value, Encoded) and inputs.keys() & {t.data_ptr() for t in handle.value.held()}:
                wrong.append(f"input in slot {handle.index}")

    host.gradients(looking(host, look), (everything("int8"),))
    assert not wrong
    assert groups >= {"attention_qk", "attention_out", "mlp"}


def test_a_llama_layer_by_group() -> None:
    host = Host(models.lora(models.llama(layers=1), "all"))
    found: list[str] = []
    host.gradients(looking(host, lambda call: found.extend(s.group for s in call.statistics)), (everything("int8"),))
    # q and k, v, the kernel's output, gate and up, the residual stream behind attention
    assert sorted(found) == sorted(["attention_qk"] * 2 + ["attention_v", "attention_out"] + ["mlp"] * 2 + ["residual"])


def test_only_the_named_groups_are_touched() -> None:
    host = Host(models.lora(models.llama(layers=2), "all"))
    exact = host.gradients(small_loss, None)
    found: list[str] = []
    look = looking(host, lambda call: found.extend(s.group for s in call.statistics))
    gradients = host.gradients(look, (Treatment.parse("L:mlp=int8"), R))
    assert set(found) == {"mlp"} and len(found) == 2
    assert 0 < _error(exact, gradients) < 0.05


def test_less_is_held() -> None:
    host = Host(models.lora(models.llama(layers=1), "all"))
    held: dict[str, int] = {}
    for treatment in (Treatment(Action.STORE), everything("bf16"), everything("int8")):

        def look(call: UnitCall, name: str = treatment.name) -> None:
            held[name] = sum(call.held_storages().values()) - sum(call.input_storages().values())

        host.gradients(looking(host, look), (treatment,))
    stored, bf16, int8 = held.values()
    # log-sum-exp, norms' statistics and the narrow side of adapters stay as they are
    assert 0.45 * stored < bf16 < 0.75 * stored
    assert int8 < bf16


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_compressing_after_forward_is_compressing_in_forward(family: str) -> None:
    host = Host(adapted(family, "lora"))
    treatment = everything("int8")
    at_once = host.gradients(small_loss, (treatment,))
    afterwards = host.gradients(looking(host, lambda call: call.compress(treatment)), (H,))
    assert differences(at_once, afterwards) == []


def test_what_was_compressed_can_still_be_replayed_exactly() -> None:
    host = Host(adapted("llama", "lora"))
    plain = host.gradients(small_loss, None)
    assert differences(plain, host.gradients(small_loss, (everything("int8"),), drop=True)) == []


def test_outputs_and_random_numbers_are_those_of_the_plain_model() -> None:
    model = models.lora(models.llama(layers=2), "all", lora_dropout=0.1)
    host = Host(model)
    after: list[Tensor] = []
    values: list[Tensor] = []

    def loss(model: nn.Module) -> Tensor:
        value = small_loss(model)
        values.append(value.detach())
        after.append(torch.get_rng_state())
        return value

    host.gradients(loss, None)
    host.gradients(loss, (everything("int8"),))
    assert torch.equal(*values) and torch.equal(*after)


def test_a_second_backward_decodes_again() -> None:
    model = models.llama(layers=1)
    host = Host(model)

    def twice(model: nn.Module) -> Tensor:
        value = small_loss(model)
        value.backward(retain_graph=True)
        twice.first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}  # type: ignore
        model.zero_grad()
        return value

    second = host.gradients(twice, (everything("int8"),))
    assert differences(twice.first, second) == []  # type: ignore[attr-defined]


def test_state_that_is_not_finite_is_flagged() -> None:
    model = models.llama(layers=1)
    with torch.no_grad():
        model.get_decoder().layers[0].mlp.gate_proj.weight[0, 0] = float("inf")  # type: ignore[operator]
    host = Host(model)
    flags: list[bool] = []
    look = looking(host, lambda call: flags.extend(not bool(s.squares.sum().isfinite()) for s in call.statistics))
    host.gradients(look, (Treatment.parse("L:mlp=int8"),))
    assert any(flags)


def test_a_tensor_that_no_codec_shrinks_stays_as_it_is() -> None:
    model = models.llama(layers=1).to(torch.bfloat16)
    host = Host(model)
    encoded: list[torch.dtype] = []

    def look(call: UnitCall) -> None:
        metas = [(call.metas[handle.index], handle.value) for handle in call._alive()]
        encoded.extend(meta.dtype for meta, value in metas if meta is not None and isinstance(value, Encoded))

    host.gradients(looking(host, look), (everything("bf16"),))
    assert set(encoded) <= {torch.float32}  # of norms, which work in float32


def shelf(group: str, tensor: Tensor) -> Shelf:
    return Shelf(group, Kept(tensor, 0), ())


def test_one_tensor_of_a_group_is_picked() -> None:
    """The largest with a storage of its own, the first saved of equals; of the dtypes and bytes that are asked for."""
    small, large, equal = (torch.zeros(n, dtype=torch.bfloat16) for n in (8, 16, 16))
    wide = torch.zeros(64, dtype=torch.bfloat16)
    found = [
        shelf("mlp", small),
        shelf("mlp", large),
        shelf("mlp", equal),
        shelf("mlp", wide[:32]),  # frees nothing: the rest of its storage stays
        shelf("mlp", torch.zeros(32)),
        shelf("residual", wide),
    ]
    of_bf16 = frozenset({torch.bfloat16})
    (picked,) = LargestOf("mlp", 32, of_bf16)(found)
    assert picked.base.tensor.data_ptr() == large.data_ptr()
    assert LargestOf("mlp", 33, of_bf16)(found) == []
    assert LargestOf("mlp", 0, of_bf16 | {torch.float32})(found)[0].base.tensor.dtype is torch.float32
