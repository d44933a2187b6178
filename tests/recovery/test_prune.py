"""Pruned replays give the gradients of the plain model (NOTE [Pruning rules] in recovery/prune.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_hilore.recovery import skipping
from tests.engines import difference
from tests.models import FAMILIES, llama, lora
from tests.recovery.plans import differences
from tests.recovery.pruning import Batch, PruningHost, batch
from tests.runtime.shortage import Shortage

LAYERS = 3
#: Layout -> (batch, share of all positions that a replay may run at most).
LAYOUTS: dict[str, tuple[Batch, float]] = {
    "dead rows": (batch([16, 0, 16, 0], 16), 0.5),
    "lengths": (batch([64, 20, 0, 40], 64), 0.5),
    "left padding": (batch([64, 40, 0, 50], 64, left=[0, 16, 2, 30]), 0.45),
    "all dead": (batch([0, 0, 0], 16), 0.0),
    "all live": (batch([16, 16], 16), 1.0),
}


def _host(adapters: bool, **config: Any) -> PruningHost:
    model = llama(LAYERS, **config)
    return PruningHost(lora(model) if adapters else model)


@pytest.mark.parametrize("adapters", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_the_plain_model(layout: str, adapters: bool) -> None:
    sample, most = LAYOUTS[layout]
    host = _host(adapters)
    ours = host.pruned_gradients(sample.loss)
    plain = host.gradients(sample.loss, None)
    assert host.pruning.refused == {}
    assert host.pruning.live_share is not None and host.pruning.live_share <= most
    assert difference(plain, ours) < 1e-6


def test_dead_rows_keep_the_bits_where_kernels_do() -> None:
    """Nothing dead, and no peak to keep down: the replay runs as the plain unit does."""
    host = _host(adapters=True)
    host.context.lean_replay = False
    sample, _ = LAYOUTS["all live"]
    assert differences(host.gradients(sample.loss, None), host.pruned_gradients(sample.loss)) == []


def test_forward_is_bitwise() -> None:
    sample, _ = LAYOUTS["lengths"]
    host = _host(adapters=True)
    host.pruned_gradients(sample.loss)
    pruned = sample.loss(host._switched_on())
    assert host.pruned() == LAYERS
    host.model.get_base_model()._set_gradient_checkpointing(enable=False)  # type: ignore[operator]
    assert torch.equal(pruned, sample.loss(host.model))


def test_p1_liveness_is_read_once_per_backward() -> None:
    """The gradient that a pruned unit hands on is known: nobody looks at it again."""
    host = _host(adapters=True)
    host.pruned_gradients(LAYOUTS["lengths"][0].loss)
    before = host.pruning.chain.reads
    host.gradients(LAYOUTS["lengths"][0].loss, [])
    assert host.pruning.chain.reads == before + 1


FAMILY_NAMES = ["qwen2", "phi3", "gemma3", "gpt_neox"]


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("layout", ["lengths", "left padding"])
def test_families(family: str, layout: str) -> None:
    """Gemma-3 mixes sliding windows and full attention: two masks, each with borders of its own."""
    sample, _ = LAYOUTS[layout]
    host = PruningHost(lora(FAMILIES[family]()))
    ours = host.pruned_gradients(sample.loss)
    assert host.pruning.refused == {} and host.pruning.live_share is not None and host.pruning.live_share < 0.6
    assert difference(host.gradients(sample.loss, None), ours) < 1e-6


def test_dead_work_is_left_out() -> None:
    """LoRA: nothing needs the output of the frozen down projection, in a pruned replay neither (design fact 14)."""
    sample, _ = LAYOUTS["lengths"]
    host = _host(adapters=True)
    skipped: list[Any] = []
    once = skipping._once

    def counted(child: Any, x: torch.Tensor) -> torch.Tensor:
        skipped.append(child)
        return once(child, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skipping, "_once", counted)
        ours = host.pruned_gradients(sample.loss)
    assert len(skipped) == LAYERS * 3  # rows of three lengths; nothing before the class has shown what is dead
    assert difference(host.gradients(sample.loss, None), ours) < 1e-6


def test_left_padding_is_cut_off() -> None:
    """Without borders the rows would start at their padding."""
    sample, _ = LAYOUTS["left padding"]
    host = _host(adapters=True)
    host.pruned_gradients(sample.loss)
    with_borders = host.pruning.live_share
    everything = batch([64, 40, 0, 50], 64)
    host.pruned_gradients(everything.loss)
    assert with_borders is not None and host.pruning.live_share is not None
    assert with_borders < host.pruning.live_share


def test_segments_of_packed_rows() -> None:
    """Two of three sequences in one row, told apart by their position ids, are dead or short."""
    host = _host(adapters=True)
    ids = torch.randint(3, 500, (1, 96), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(40), torch.arange(24), torch.arange(32)])[None]
    weights = torch.zeros(1, 96)
    weights[0, 3:20] = 1.0  # first sequence: short; second: dead; third: to its end
    weights[0, 70:95] = -0.5

    def loss(model: Any) -> torch.Tensor:
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float().log_softmax(-1)
        return (logits[..., 7] * weights).sum() / 8

    ours = host.pruned_gradients(loss)
    plain = host.gradients(loss, None)
    assert host.pruning.live_share == 2 * 32 / 96  # the two live ones, as one batch
    assert difference(plain, ours) < 1e-6


def test_eager_attention() -> None:
    """Additive masks."""
    sample, most = LAYOUTS["left padding"]
    host = _host(adapters=True, attn_implementation="eager")
    ours = host.pruned_gradients(sample.loss)
    assert host.pruning.live_share is not None and host.pruning.live_share <= most
    assert difference(host.gradients(sample.loss, None), ours) < 1e-6


def test_left_padding_that_comes_later() -> None:
    """Begins are cut from the second batch that has any: the first one lets the class show it."""
    host = _host(adapters=True)
    host.pruned_gradients(batch([64, 40, 0, 50], 64, left=[0, 0, 0, 0]).loss)
    sample, most = LAYOUTS["left padding"]
    shares = []
    for _ in range(3):
        ours = host.gradients(sample.loss, [])
        shares.append(host.pruning.live_share)
        host.pruning.clear()
        assert difference(host.gradients(sample.loss, None), ours) < 1e-6
    assert shares[0] > most >= shares[-1]  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16 weights", "autocast"])
def test_low_precision(dtype: torch.dtype) -> None:
    """As near to float64 as the plain model is, give or take a half."""
    sample, most = LAYOUTS["left padding"]

    def loss(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
            return sample.loss(model)

    host = PruningHost(lora(llama(LAYERS)).to(dtype))
    ours, plain = host.pruned_gradients(loss), host.gradients(loss, None)
    assert host.pruning.live_share is not None and host.pruning.live_share <= most
    exact = PruningHost(lora(llama(LAYERS)).double()).gradients(sample.loss, None)
    as_double = lambda found: {name: value.double() for name, value in found.items()}  # noqa: E731
    assert difference(exact, as_double(ours)) < 1.5 * difference(exact, as_double(plain))


def test_a_cast_without_grad_is_not_kept() -> None:
    """Two forwards in one autocast: the first runs pruned, the second must still reach the weights."""
    sample, _ = LAYOUTS["lengths"]
    host = _host(adapters=False)

    def loss(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            first = sample.loss(model)
            model._set_gradient_checkpointing(enable=False)
            return first + sample.loss(model)

    host.pruned_gradients(loss)
    ours = host.gradients(loss, [])
    plain = host.gradients(loss, None)
    for name, value in plain.items():
        assert float((ours[name] - value).norm() / value.norm()) < 0.1, name


def test_a_pruned_replay_that_lacked_memory_is_done_again() -> None:
    """R10: with the same gradients, once something was freed; what is no such failure is not tried again."""
    sample, _ = LAYOUTS["lengths"]
    host = _host(True)
    expected = host.pruned_gradients(sample.loss)
    asked: list[str] = []

    def relieve(call: Any, error: Exception) -> bool:
        asked.append(str(call.unit))
        return isinstance(error, MemoryError)

    host.context.relieve = relieve
    shortage = Shortage(2, error=lambda asked: MemoryError())
    with shortage.in_replays_of(host.model.base_model.model.model.layers[1].self_attn):  # type: ignore[union-attr, index]
        found = host.gradients(sample.loss, [])
    assert host.pruned() == 0 and shortage.failed == 2 and asked == ["unit.1", "unit.1"]
    assert not differences(found, expected)
    with (
        Shortage(error=ValueError).in_replays_of(host.model.base_model.model.model.layers[1].self_attn),  # type: ignore[union-attr, index]
        pytest.raises(ValueError, match="1"),
    ):
        host.gradients(sample.loss, [])
