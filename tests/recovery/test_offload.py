"""NOTE [Offload rules] of recovery/offload.py: what goes, when the originals go, and that every use waits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_hilore.core.errors import OffloadError, StateChanged
from ds_hilore.core.treatment import INPUT_OFFLOADED, OFFLOADED, STORED, Treatment
from ds_hilore.recovery.offload import MIN_MOVED_BYTES
from ds_hilore.recovery.unit import UnitCall
from tests import models
from tests.recovery.links import LateLink, WatchedLink, failing, over
from tests.recovery.plans import Host, R, adapted, differences, small_loss
from tests.recovery.pruning import PruningHost, batch
from tests.recovery.scenes import SCENES, Block, tensor, weights
from tests.recovery.units import CPU, H, Units, gradients, same

O, RI = OFFLOADED, INPUT_OFFLOADED  # noqa: E741  the letter that plans show
PLANS = {"all-O": (O,), "all-R, inputs away": (RI,), "mixed": (O, H, RI, R)}
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")


def _forward(host: Host) -> tuple[Tensor, list[UnitCall]]:
    """A loss that waits for its backward, and its calls."""
    kept: list[UnitCall] = []

    def loss(model: nn.Module) -> Tensor:
        value = small_loss(model)
        kept.extend(host.calls)
        return value

    host.calls.clear()
    base = host.model.get_base_model() if hasattr(host.model, "get_base_model") else host.model  # type: ignore[operator]
    base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=host.checkpoint)  # type: ignore[operator]
    return loss(host.model), kept


# -- exactness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapters", ["full", "lora-dropout"])
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3", "gpt_neox", "mixtral"])
def test_gradients_are_the_plain_ones(family: str, adapters: str) -> None:
    host = Host(adapted(family, adapters))
    plain = host.gradients(small_loss, None)
    for name, plan in PLANS.items():
        assert differences(plain, host.gradients(small_loss, plan)) == [], name
    assert differences(plain, host.gradients(small_loss, (O,), drop=True)) == [], "offloaded, then dropped"


def test_under_autocast_and_in_bfloat16() -> None:
    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return small_loss(model)

    for host, wanted in (
        (Host(adapted("llama", "lora")), loss),
        (Host(adapted("llama", "lora").to(torch.bfloat16)), small_loss),
    ):
        plain = host.gradients(wanted, None)
        for name, plan in PLANS.items():
            assert differences(plain, host.gradients(wanted, plan)) == [], name


def test_pruned_replays_start_from_inputs_in_host_memory() -> None:
    link, rows = WatchedLink(), batch([16, 0, 9, 0], 16)
    here, there = PruningHost(adapted("llama", "lora")), PruningHost(adapted("llama", "lora"), over(link), treatment=RI)
    pruned: list[int] = []

    def loss(model: nn.Module) -> Tensor:
        value = rows.loss(model)
        pruned.append(there.pruned())
        return value

    expected, found = here.pruned_gradients(rows.loss), there.pruned_gradients(loss)
    assert pruned[-1] == len(models.decoder_layers(there.model)) and len(link.sent) == 2 * pruned[-1]
    assert differences(expected, found) == []


# -- O1, O2: what goes ---------------------------------------------------------------------------------------------


def _large(sizes: dict[int, int]) -> int:
    return sum(size for size in sizes.values() if size >= MIN_MOVED_BYTES)


def test_o1_base_tensors_go_once() -> None:
    """As many bytes as the stored bundle holds, what all units are called with aside."""
    model = adapted("llama", "lora")
    link = WatchedLink()
    away, stored = Host(model, over(link), (O,)), Host(model, actions=(STORED,))
    _loss, calls = _forward(stored)
    shared = set.intersection(*[set(call.input_storages()) for call in calls])
    held = [_large({a: s for a, s in call.held_storages().items() if a not in shared}) for call in calls]
    _other, gone = _forward(away)
    assert sum(held) == sum(link.sent) > 0
    for call, expected in zip(gone, held, strict=True):
        assert sum(call.host_storages().values()) == expected
        assert _large({a: s for a, s in call.held_storages().items() if a not in call.host_storages()}) <= _large(
            {a: s for a, s in stored.calls[0].input_storages().items() if a in shared}
        )


def test_o2_of_the_inputs_only_the_hidden_states_go() -> None:
    link = WatchedLink()
    host = Host(adapted("llama", "lora"), over(link), (RI,))
    _loss, calls = _forward(host)
    hidden = 2 * 16 * 64 * 4
    assert link.sent == [hidden] * len(calls)


# -- O3: the originals go ------------------------------------------------------------------------------------------


def _watched(host: Host) -> tuple[Tensor, list[list[StorageWeakRef]]]:
    """A loss, and for each unit the storages of its hidden states, its attention's output and its MLP's product."""
    noted: list[list[StorageWeakRef]] = []
    handles = []
    for layer in models.decoder_layers(host.model):
        own: list[StorageWeakRef] = []
        noted.append(own)

        def note(_: nn.Module, args: tuple[Tensor, ...], own: list[StorageWeakRef] = own) -> None:
            own.append(StorageWeakRef(args[0].untyped_storage()))

        for module in (layer, layer.self_attn.o_proj, layer.mlp.down_proj):  # type: ignore[union-attr]
            handles.append(module.register_forward_pre_hook(note))
    loss, _ = _forward(host)
    for handle in handles:
        handle.remove()
    return loss, noted


def test_o3_originals_are_gone_after_forward_and_copies_after_backward() -> None:
    model = adapted("llama", "full")
    alive = {}
    for name, plan in {"stored": (STORED,), "away": (O,), "inputs away": (RI,), "replayed": (R,)}.items():
        host = Host(model, actions=plan)
        loss, noted = _watched(host)
        host.calls.clear()
        alive[name] = [[not reference.expired() for reference in own] for own in noted]
        del loss
    # the product is derived: a recipe stands for it even where everything is stored
    layers = len(models.decoder_layers(model))
    assert alive["stored"] == [[True, True, False]] * layers
    assert alive["away"] == [[False, False, False]] * layers
    assert alive["replayed"] == [[True, False, False]] * layers
    assert alive["inputs away"] == [[False, False, False]] * layers


def test_o3_host_copies_go_with_the_backward_of_their_unit() -> None:
    host = Host(adapted("llama", "lora"), actions=(O,))
    loss, calls = _forward(host)
    copies = [StorageWeakRef(parcel.tensor.untyped_storage()) for call in calls for parcel in call.parcels]
    assert copies and not any(copy.expired() for copy in copies)
    sets = [call.parcels for call in calls]
    host.calls.clear()
    del calls
    loss.backward()
    assert all(copy.expired() for copy in copies) and not any(sets)


def test_o3_a_late_copy_keeps_its_original_until_the_next_is_sent() -> None:
    units = Units(O, over(LateLink()))
    block, x = weights(CPU, Block()), tensor(CPU)
    hidden = x * 1
    original = StorageWeakRef(hidden.untyped_storage())
    out = units.run(block.forward, hidden)
    del hidden
    gone_at_once = original.expired()
    out = units.run(block.forward, out)
    assert not gone_at_once and original.expired()


def test_dropping_frees_the_host_copy_of_the_bundle_and_keeps_that_of_the_input() -> None:
    host = Host(adapted("llama", "lora"), actions=(O,))
    _loss, calls = _forward(host)
    for call in calls:
        before = sum(call.host_storages().values())
        call.drop()
        assert 0 < sum(call.host_storages().values()) == 2 * 16 * 64 * 4 < before


# -- O4: every use waits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_o4_late_copies_change_nothing(seed: int | None) -> None:
    """A copy that nobody waited for holds NaN: one use of it would show."""
    host = Host(adapted("llama", "lora-dropout"), over(LateLink(seed)))
    plain = host.gradients(small_loss, None)
    for name, plan in PLANS.items():
        for _ in range(2):
            assert differences(plain, host.gradients(small_loss, plan)) == [], name
    assert differences(plain, host.gradients(small_loss, (O,), drop=True)) == []


@pytest.mark.parametrize("name", SCENES)
def test_o4_late_copies_of_whatever_a_unit_takes_or_gives(name: str) -> None:
    plain = gradients(SCENES[name], None)
    for treatment in (O, RI):
        assert same(plain, gradients(SCENES[name], Units(treatment, over(LateLink()))))


def test_o4_a_use_that_does_not_wait_is_noticed_by_these_tests() -> None:
    host = Host(adapted("llama", "lora"), over(LateLink(awaited=False)))
    plain = host.gradients(small_loss, None)
    for plan in PLANS.values():
        assert differences(plain, host.gradients(small_loss, plan))


# -- O5: one unit ahead --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [(O,), (RI,), (R, O, H, O)], ids=["all-O", "inputs", "mixed"])
def test_o5_state_is_called_back_one_copy_ahead(plan: tuple[Treatment, ...]) -> None:
    link = WatchedLink()
    host = Host(models.lora(models.llama(layers=4)), over(link), plan)
    loss, calls = _forward(host)
    order = [call.unit for call in calls]
    parcels = {call.unit: len(call.parcels) for call in calls}
    fetched: dict[int, int] = {}

    def watch(call: UnitCall) -> None:
        fetched.setdefault(order.index(call.unit), len(link.fetched))

    host.context.watch = watch
    host.calls.clear()
    loss.backward()
    assert sorted(fetched) == list(range(4))
    for position, count in fetched.items():
        # units behind this one have called back their own state, and that of the nearest before them that is away
        wanted: set[int] = set()
        for behind in range(position + 1, 4):
            away = [place for place in range(behind) if parcels[order[place]]]
            wanted |= {behind, *away[-1:]}
        assert count == sum(parcels[order[place]] for place in wanted)
    assert len(link.fetched) == len(link.sent)


# -- O6, and copies that fail --------------------------------------------------------------------------------------


def test_o6_an_edit_before_the_copy_has_arrived_is_noticed() -> None:
    units = Units(O, over(LateLink()))
    block, x = weights(CPU, Block()), tensor(CPU)
    hidden = (x * 1).detach().requires_grad_()
    out = units.run(block.forward, hidden)
    with torch.no_grad():
        hidden.mul_(2)
    with pytest.raises(StateChanged, match=r"unit unit\.0.*changed in place"):
        out.sum().backward()


def test_o6_an_edit_after_it_has_arrived_harms_nothing() -> None:
    block, x = weights(CPU, Block()), tensor(CPU)
    expected = torch.autograd.grad(block(x).sum(), list(block.parameters()))
    hidden = (x * 1).detach().requires_grad_()
    out = Units(O).run(block.forward, hidden)
    with torch.no_grad():
        hidden.mul_(2)
    assert same(expected, torch.autograd.grad(out.sum(), list(block.parameters())))


@pytest.mark.parametrize("way", ["to host", "to device"])
@pytest.mark.parametrize("after", [0, 5])
def test_a_copy_that_fails_is_a_typed_error_and_the_next_update_is_right(way: str, after: int) -> None:
    link = WatchedLink(before=failing(way, RuntimeError("the driver has gone"), after=after))
    host = Host(adapted("llama", "lora"), over(link))
    plain = host.gradients(small_loss, None)
    with pytest.raises(OffloadError, match=rf"could not be copied {'to' if way == 'to host' else 'from'} host memory"):
        host.gradients(small_loss, (O, RI))
    assert differences(plain, host.gradients(small_loss, (O, RI))) == []


def test_a_failed_allocation_of_host_memory_is_a_typed_error() -> None:
    host = Host(adapted("llama", "lora"), over(WatchedLink(before=failing("to host", MemoryError()))))
    with pytest.raises(OffloadError, match=r"hilore\.host_budget"):
        host.gradients(small_loss, (O,))


@pytest.mark.parametrize("times", [1, 3])
def test_memory_that_is_short_when_state_comes_back_is_had_from_other_units(times: int) -> None:
    """R10: a copy ahead of use that fails is left for later; one that is needed asks others to give up state."""
    host = Host(adapted("llama", "lora"), over(WatchedLink(before=failing("to device", OUT_OF_MEMORY, times, 2))))
    plain = host.gradients(small_loss, None)
    asked: list[str] = []

    def relieve(call: UnitCall, error: Exception) -> bool:
        asked.append(str(call.unit))
        return True

    host.context.relieve = relieve
    assert differences(plain, host.gradients(small_loss, (O,))) == []
    assert len(asked) <= times
