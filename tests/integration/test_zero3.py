"""Units as ZeRO-3 leaf modules: gradients, collective schedule, memory, undo (rules Z1 to Z5 there)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hilore.core.errors import UnsupportedError, UsageError
from ds_hilore.integration.zero3 import gathered_numel, leaf_units
from tests.collectives import recorded
from tests.engines import checkpointed, config, difference, engine, exact, gradients
from tests.models import VOCAB, batch, decoder_layers, llama, lora, mixtral, plain_loss
from tests.ranks import RankPool

HERE = "tests.integration.test_zero3"
OFFLOAD = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


# ------------------------------------------------------------------------------------------------ bodies of ranks


def gradient_error(
    adapters: bool, checkpoint: bool = False, accumulation: int = 1, zero_init: bool = False, **zero: Any
) -> float:
    """Two updates of unit engines against plain torch; the worst error of any parameter's reduced gradient."""
    import deepspeed

    def build() -> nn.Module:
        return lora(llama(layers=3)) if adapters else llama(layers=3)

    settings = config(3, accumulation, lr=0.0, **zero)
    oracle, model = build(), build()
    if zero_init:
        deepspeed.zero.Init(module=model, config_dict_or_path=settings)  # partitioned before initialize sees it
    made = engine(checkpointed(model) if checkpoint else model, settings, decoder_layers(model))
    batches = [batch(seed=10 * dist.get_rank() + k) for k in range(accumulation)]
    expected = exact(oracle, [plain_loss(oracle, *b) for b in batches])
    worst = 0.0
    for _ in range(2):  # the second time with a completed trace and prefetching; weights as in the first
        for microbatch in batches:
            made.backward(plain_loss(made, *microbatch))
            found = gradients(made) if made.is_gradient_accumulation_boundary() else {}
            if found:
                worst = max(worst, difference(found, expected))
            made.step()
    return worst


def two_forwards() -> float:
    """Two forwards before one backward of both losses, with a forward without grad in between."""
    model, oracle = lora(llama()), lora(llama())
    made = engine(model, config(3, lr=0.0), decoder_layers(model))
    one, two = (batch(seed=10 * dist.get_rank() + k) for k in range(2))
    expected = exact(oracle, [plain_loss(oracle, *one) + plain_loss(oracle, *two)])
    worst = 0.0
    for _ in range(3):
        first = plain_loss(made, *one)
        with torch.no_grad():
            plain_loss(made, *two)
        made.backward(first + plain_loss(made, *two))
        worst = max(worst, difference(gradients(made), expected))
        made.step()
    return worst


class Layer(nn.Module):
    """A residual layer with one linear layer per expert; a row of the batch goes to one expert, or to none."""

    def __init__(self, width: int, experts: int, shared: nn.Linear | None = None) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width) if shared is None else shared
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor, expert_of_row: list[int]) -> Tensor:
        rows = [self.experts[e](row) if e >= 0 else row for e, row in zip(expert_of_row, x, strict=True)]
        return x + torch.tanh(self.mix(x)) + torch.stack(rows)


class Experts(nn.Module):
    """A model of such layers; `share` lets layers 0 and 2 hold the same linear layer."""

    def __init__(self, share: bool = False, outside: bool = False, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCAB, width)
        first = Layer(width, 3)
        self.layers = nn.ModuleList([first, Layer(width, 3), Layer(width, 3, first.mix if share else None)])
        self.head = nn.Linear(width, 1)
        self.outside = outside

    def forward(self, ids: Tensor, plan: list[list[int]]) -> Tensor:
        x = self.embedding(ids)
        if self.outside:  # a unit's parameter is used before the unit: its gradient is complete after the unit's
            x = x + nn.functional.linear(x, self.layers[1].mix.weight)
        for layer, experts in zip(self.layers, plan, strict=True):
            x = layer(x, experts)
        return self.head(x).square().mean()


#: Experts of two rows per layer, for each rank and microbatch. Rank 0 uses no expert at all in its second microbatch.
ROUTES = [
    [[[0, 1], [2, 2], [-1, 0]], [[-1, -1], [-1, -1], [-1, -1]]],
    [[[2, 2], [-1, 1], [1, 2]], [[0, 2], [1, 0], [-1, 2]]],
]


def routed_error(bucket: int, share: bool = False, accumulation: int = 2) -> tuple[float, list[Any]]:
    """Error against plain torch of a model whose ranks use different experts, and this rank's collectives."""
    model, oracle = Experts(share), Experts(share)
    made = engine(model, config(3, accumulation, lr=0.0, reduce_bucket_size=bucket), list(model.layers))
    rank = dist.get_rank()
    inputs = [(batch(seed=5 * rank + k)[0], ROUTES[rank][k]) for k in range(accumulation)]
    expected = exact(oracle, [oracle(*arguments) for arguments in inputs])
    worst = 0.0
    with recorded() as records:
        for _ in range(2):
            for arguments in inputs:
                made.backward(made(*arguments))
                if made.is_gradient_accumulation_boundary():
                    worst = max(worst, difference(gradients(made), expected))
                made.step()
    return worst, records


def used_outside() -> str:
    model = Experts(outside=True)
    made = engine(model, config(3), list(model.layers))
    loss = made(batch(0)[0], ROUTES[0][0])
    try:
        made.backward(loss)
    except UnsupportedError as error:
        return str(error)
    return ""


def schedule(replaying_rank: int | None) -> list[Any]:
    """Collectives of three updates in which one rank (or none) replays every unit in backward."""
    model = lora(mixtral())
    if dist.get_rank() == replaying_rank:
        checkpointed(model)
    made = engine(model, config(3, reduce_bucket_size=20_000), decoder_layers(model))
    with recorded() as records:
        for step in range(3):
            made.backward(plain_loss(made, *batch(seed=10 * dist.get_rank() + step)))
            made.step()
    return records


def user_leaves_inside() -> float:
    """Leaf modules that the user set inside the units (here: the MLPs) change nothing: the outermost counts."""
    from deepspeed.utils import set_z3_leaf_modules

    model, oracle = lora(llama()), lora(llama())
    set_z3_leaf_modules(model, ["LlamaMLP"])
    made = engine(model, config(3), decoder_layers(model))
    microbatch = batch(seed=dist.get_rank())
    made.backward(plain_loss(made, *microbatch))
    return difference(gradients(made), exact(oracle, [plain_loss(oracle, *microbatch)]))


def memory() -> dict[str, list[int]]:
    """Whole parameters and whole unreduced gradients (elements) seen in forward and backward, and sizes of modules."""
    model = llama(layers=4)
    made = engine(
        model,
        config(
            3,
            reduce_bucket_size=1,
            stage3_prefetch_bucket_size=0,
            stage3_max_live_parameters=0,
            stage3_max_reuse_distance=0,
        ),
        decoder_layers(model),
    )
    seen: dict[str, list[int]] = {"gathered": [], "gradients": [], "after": []}

    def look(*_: Any) -> None:
        seen["gathered"].append(gathered_numel(made))
        seen["gradients"].append(sum(p.grad.numel() for p in made.module.parameters() if p.grad is not None))

    def look_in_both_passes(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        look()
        output.register_hook(look)

    layers: list[Any] = decoder_layers(model)
    for layer in layers:
        layer.mlp.act_fn.register_forward_hook(look_in_both_passes)
    for _ in range(2):
        made.backward(plain_loss(made, *batch(0)))
        seen["after"].append(gathered_numel(made))
        made.step()
    sizes = [sum(p.ds_numel for p in m.parameters()) for m in (decoder_layers(model)[0], model.lm_head)]
    return {**seen, "sizes": sizes}


def undone() -> dict[str, bool]:
    """What is given back: on leaving the context, on undo, on an error within."""
    from deepspeed.runtime.zero import stage3

    cls = stage3.DeepSpeedZeroOptimizer_Stage3
    before = (cls.create_reduce_and_remove_grad_hooks, stage3.z3_leaf_parameter)
    model = llama()
    units = decoder_layers(model)
    units[0]._z3_leaf = False
    seen = {}
    with leaf_units(model, units) as leaves:
        with leaf_units(model, units[:1]) as again:
            seen["one handle"] = again is leaves
        import deepspeed

        made, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config(3))
    seen["class restored"] = before == (cls.create_reduce_and_remove_grad_hooks, stage3.z3_leaf_parameter)
    seen["patched"] = "independent_gradient_partition_epilogue" in made.optimizer.__dict__
    hooks = [len(unit._forward_hooks) for unit in units]
    leaves.undo()
    seen["unit hooks removed"] = [len(unit._forward_hooks) for unit in units] == [count - 1 for count in hooks]
    patched = {"reduce_ready_partitions_and_remove_grads", "independent_gradient_partition_epilogue"}
    seen["optimizer restored"] = not patched & made.optimizer.__dict__.keys()
    seen["offload restored"] = "pre_sub_module_backward_function" not in made.optimizer.parameter_offload.__dict__
    seen["flags restored"] = units[0]._z3_leaf is False and not any("_z3_leaf" in u.__dict__ for u in units[1:])
    return seen


# ---------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"adapters": True}, id="lora, frozen embedding"),
        pytest.param({"adapters": True, "checkpoint": True}, id="lora, checkpointing"),
        pytest.param({"adapters": False, "accumulation": 3, "reduce_bucket_size": 5_000}, id="full, 3 microbatches"),
        pytest.param({"adapters": False, "zero_init": True}, id="zero.Init"),
        pytest.param({"adapters": True, "zero_hpz_partition_size": 2}, id="hpZ"),
        pytest.param({"adapters": True, "accumulation": 2, **OFFLOAD}, id="offload"),
        pytest.param(
            {"adapters": False, "overlap_comm": True, "stage3_param_persistence_threshold": 1000}, id="overlap"
        ),
    ],
)
def test_gradients_equal_plain_torch(ranks: RankPool, case: dict[str, Any]) -> None:
    assert max(ranks.run(f"{HERE}:gradient_error", **case)) < 1e-6


def test_two_forwards_before_one_backward(ranks: RankPool) -> None:
    assert max(ranks.run(f"{HERE}:two_forwards")) < 1e-6


@pytest.mark.parametrize("bucket", [300, 10**6])
@pytest.mark.parametrize("share", [False, True])
def test_z3_ranks_with_different_experts(ranks: RankPool, bucket: int, share: bool) -> None:
    (error_0, records_0), (error_1, records_1) = ranks.run(f"{HERE}:routed_error", bucket=bucket, share=share)
    assert max(error_0, error_1) < 1e-6
    assert records_0 == records_1
    assert any(name.startswith("reduce_scatter") for name, _, _ in records_0)


def test_late_gradient_is_refused(ranks: RankPool) -> None:
    assert all("arrived after the unit was reduced" in message for message in ranks.run(f"{HERE}:used_outside"))


def test_z1_schedule_does_not_depend_on_the_plan(ranks: RankPool) -> None:
    nobody, one, other = (ranks.run(f"{HERE}:schedule", replaying_rank=rank) for rank in (None, 0, 1))
    assert nobody[0] == nobody[1] == one[0] == one[1] == other[0] == other[1]
    names = {name for name, _, _ in nobody[0]}
    assert any("gather" in name for name in names) and any("reduce_scatter" in name for name in names), names


def test_leaf_modules_inside_units(ranks: RankPool) -> None:
    assert max(ranks.run(f"{HERE}:user_leaves_inside")) < 1e-6


def test_z4_memory(ranks: RankPool) -> None:
    for seen in ranks.run(f"{HERE}:memory"):
        unit, head = seen["sizes"]
        assert max(seen["gathered"]) <= 2 * unit
        assert max(seen["gradients"]) <= 2 * unit + head  # one unit waiting, one running, one in the bucket
        assert seen["after"] == [0, 0]


def test_undo(ranks: RankPool) -> None:
    for seen in ranks.run(f"{HERE}:undone"):
        assert all(seen.values()), seen


def test_wrong_units_are_refused_and_leave_no_trace() -> None:
    from deepspeed.runtime.zero import stage3

    before = stage3.DeepSpeedZeroOptimizer_Stage3.create_reduce_and_remove_grad_hooks
    model, other = Experts(), Experts()
    with pytest.raises(UsageError, match="no module of Experts"), leaf_units(model, [model.layers[0], other.layers[0]]):
        pass
    with leaf_units(model, []), pytest.raises(UsageError, match="another model"), leaf_units(other, []):
        pass
    with pytest.raises(KeyError), leaf_units(model, list(model.layers)):
        raise KeyError
    assert stage3.DeepSpeedZeroOptimizer_Stage3.create_reduce_and_remove_grad_hooks is before
    assert not any("_z3_leaf" in module.__dict__ for module in (*model.modules(), *other.modules()))


def test_nested_units_outermost_wins() -> None:
    model = Experts()
    with leaf_units(model, [model.layers[0].mix, model.layers[0], model.layers]) as leaves:
        assert leaves.modules == [model.layers]
    leaves.undo()


def test_unknown_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero import stage3

    monkeypatch.setattr(
        stage3.DeepSpeedZeroOptimizer_Stage3, "reduce_ready_partitions_and_remove_grads", lambda self, a, b: None
    )
    model = Experts()
    with pytest.raises(UnsupportedError, match="reduce_ready_partitions_and_remove_grads"), leaf_units(model, []):
        pass
