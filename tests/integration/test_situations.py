"""What a training loop does besides plain updates: the gradients stay those of DeepSpeed alone, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_hilore
from ds_hilore.core.types import Action
from ds_hilore.integration.checkpoint import checkpoint
from tests.engines import config, difference, engine
from tests.integration import updates
from tests.models import batch, decoder_layers, llama, lora, plain_loss
from tests.ranks import RankPool, run_ranks

HERE = "tests.integration.test_situations"
STAGES = pytest.mark.parametrize("stage", [0, 2, 3])


def _opposite(made: Any) -> None:
    made.hilore.force((Action.STORE, Action.RECOMPUTE)[dist.get_rank()])


def _compared(
    settings: dict[str, Any],
    build: Callable[[], nn.Module],
    between: Callable[[Any, bool], None],
    loss: Any = plain_loss,
) -> list[str]:
    """Two updates with `between(engine, is_ours)` in front of the second; names of gradients that differ."""
    reference, ours = updates.pair(build, settings)
    _opposite(ours)
    unequal = []
    for number in range(2):
        found = []
        for made in (reference, ours):
            if number == 1:
                between(made, made is ours)
            found.append(updates.run_update(made, number, loss))
        unequal += updates.unequal_bits(*found)
    return unequal


def two_forwards(stage: int) -> list[str]:
    """Two forwards with grad before one backward, with a forward without grad and adapters off in between."""

    def loss(made: Any, ids: Tensor, adv: Tensor) -> Tensor:
        first = plain_loss(made, ids, adv)
        hilore = getattr(made, "hilore", None)
        before = None if hilore is None else (hilore.microbatch, len(hilore.microbatch.calls))
        with torch.no_grad(), made.module.disable_adapter():
            plain_loss(made, ids, adv)
        assert hilore is None or before == (hilore.microbatch, len(hilore.microbatch.calls))
        return first + plain_loss(made, ids.flip(0), adv)

    return _compared(config(stage), lambda: lora(llama()), lambda made, ours: None, loss)


def generation(stage: int) -> list[str]:
    """Sampling between updates, with checkpointing switched off and on around it by the host."""

    def between(made: Any, ours: bool) -> None:
        base = made.module.get_base_model()
        base.gradient_checkpointing_disable()
        made.module.eval()
        with torch.no_grad():
            base.generate(input_ids=batch(5)[0], max_new_tokens=3, do_sample=False, synced_gpus=stage == 3)
        made.module.train()
        if ours:
            base.activation_checkpointing_enable(every_n_layers=2)
            layers: list[Any] = decoder_layers(made.module)
            assert all(layer.gradient_checkpointing for layer in layers)
            assert all(layer._gradient_checkpointing_func is checkpoint for layer in layers)
            base.disable_input_require_grads()

    return _compared(config(stage), lambda: lora(llama()), between)


def dropout(stage: int) -> list[str]:
    """LoRA dropout: the replay draws the same mask, and the streams go on as without it."""
    return _compared(config(stage), lambda: lora(llama(), lora_dropout=0.2), lambda made, ours: None)


class Planted(RuntimeError):
    """Raised in the middle of an update."""


def exception(stage: int, where: str) -> list[str]:
    """An exception in a unit's forward, or in backward, in the second of three microbatches; then a good update."""

    def between(made: Any, ours: bool) -> None:
        if not ours:
            return
        updates.run_one_microbatch(made, 7)
        layer = decoder_layers(made.module)[1]
        handle = layer.mlp.register_forward_hook(_raise if where == "forward" else _raise_in_backward)  # type: ignore
        with pytest.raises(Planted):
            updates.run_one_microbatch(made, 8)
        handle.remove()

    return _compared(config(stage, 3), lambda: lora(llama()), between)


def _raise(*_: Any) -> None:
    raise Planted


def _raise_in_backward(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(_raise)


def switched_adapter(stage: int) -> list[str]:
    """Another adapter trains from the second update on."""

    def build() -> nn.Module:
        model: Any = lora(llama())
        torch.manual_seed(3)  # of the new adapter's weights
        model.add_adapter("other", model.peft_config["default"])
        model.base_model.set_adapter(["default", "other"])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if "lora_B.other" in name:
                torch.nn.init.constant_(parameter, 0.01)
        return model

    def between(made: Any, ours: bool) -> None:
        made.module.base_model.set_adapter("other")
        for name, parameter in made.module.named_parameters():
            parameter.requires_grad_("lora_" in name)

    return _compared(config(stage), build, between)


def kinds(kind: str, stage: int) -> list[str]:
    """modules_to_save, a model from zero.Init, optimizer offload."""
    import deepspeed

    settings = config(stage, **({"offload_optimizer": {"device": "cpu"}} if kind == "offload" else {}))

    def build() -> nn.Module:
        model = lora(llama(), modules_to_save=["lm_head"] if kind == "modules_to_save" else None)
        if kind == "zero.Init":
            deepspeed.zero.Init(module=model, config_dict_or_path=settings)
        return model

    return _compared(settings, build, lambda made, ours: None)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Plain(nn.Module):
    """No transformers model: named units, or a checkpoint call of DeepSpeed's in its own forward."""

    def __init__(self, by_function: bool) -> None:
        super().__init__()
        self.by_function = by_function
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, checkpointed: bool) -> Tensor:
        import deepspeed

        x = self.first(x)
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x) if self.by_function and checkpointed else block(x)
        return x.square().mean()


def plain_model(stage: int, by_function: bool) -> dict[str, Any]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Plain(by_function)

    block = {} if by_function else {"units": ["Block"]}
    reference = engine(build(), config(stage))
    ours = updates.hilore_engine(build(), config(stage), **block)
    _opposite(ours)
    loss = lambda made, ids, adv: made(torch.randn(4, 8), made is ours)  # noqa: E731
    expected, found = updates.run_update(reference, 0, loss), updates.run_update(ours, 0, loss)
    return {"distance": difference(found, expected), "units": len(updates.actions(ours))}


def detached(stage: int) -> dict[str, Any]:
    """What `detach` gives back, and a plain update after it."""
    import deepspeed

    function = deepspeed.checkpointing.checkpoint
    reference, ours = updates.pair(lambda: lora(llama()), config(stage))
    names = set(reference.__dict__)
    replaced = deepspeed.checkpointing.checkpoint is not function
    ds_hilore.detach(ours)
    layers: list[Any] = decoder_layers(ours.module)
    unequal = updates.unequal_bits(updates.run_update(reference, 0), updates.run_update(ours, 0))
    return {
        "replaced": replaced,
        "restored": deepspeed.checkpointing.checkpoint is function,
        "left over": sorted(set(ours.__dict__) - names),
        "checkpointing": [layer.gradient_checkpointing for layer in layers],
        "unequal": unequal,
    }


def untouched(block: dict[str, Any] | None) -> dict[str, Any]:
    settings = config(2) | ({} if block is None else {"hilore": block})
    made, *_ = ds_hilore.initialize(model=llama(), config=settings)
    return {
        "hilore": hasattr(made, "hilore"),
        "patched": [n for n in ("forward", "backward", "step") if n in made.__dict__],
    }


def installed(number: int) -> list[bool]:
    """`install` twice, `uninstall` once: the block counts while installed."""
    import deepspeed

    before = deepspeed.initialize
    ds_hilore.install()
    ds_hilore.install()
    made, *_ = deepspeed.initialize(model=llama(), config_params=config(2) | {"hilore": {"memory_budget": "1.1x"}})
    ds_hilore.uninstall()
    return [hasattr(made, "hilore"), deepspeed.initialize is before]


# ------------------------------------------------------------------------------------------------------------- tests


def _all_equal(found: list[list[str]]) -> None:
    assert found == [[], []]


@pytest.mark.parametrize("stage", [0, 1, 3])  # ZeRO-2 cannot: its gradients are reduced at their first accumulation
def test_two_forwards_before_one_backward(ranks: RankPool, stage: int) -> None:
    _all_equal(ranks.run(f"{HERE}:two_forwards", stage=stage))


@STAGES
def test_generation_between_updates(ranks: RankPool, stage: int) -> None:
    _all_equal(ranks.run(f"{HERE}:generation", stage=stage))


@STAGES
def test_dropout(ranks: RankPool, stage: int) -> None:
    _all_equal(ranks.run(f"{HERE}:dropout", stage=stage))


@STAGES
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exception_then_a_good_update(ranks: RankPool, stage: int, where: str) -> None:
    _all_equal(ranks.run(f"{HERE}:exception", stage=stage, where=where))


@pytest.mark.parametrize("stage", [0, 2])
def test_adapter_switched_between_updates(ranks: RankPool, stage: int) -> None:
    _all_equal(ranks.run(f"{HERE}:switched_adapter", stage=stage))


@pytest.mark.parametrize(
    ("kind", "stage"), [("modules_to_save", 2), ("modules_to_save", 3), ("zero.Init", 3), ("offload", 3)]
)
def test_kinds_of_models(ranks: RankPool, kind: str, stage: int) -> None:
    _all_equal(ranks.run(f"{HERE}:kinds", kind=kind, stage=stage))


@pytest.mark.parametrize("by_function", [False, True], ids=["units", "deepspeed.checkpointing.checkpoint"])
@STAGES
def test_a_model_that_is_not_of_transformers(ranks: RankPool, stage: int, by_function: bool) -> None:
    for found in ranks.run(f"{HERE}:plain_model", stage=stage, by_function=by_function):
        assert found["units"] == 3
        assert found["distance"] <= 1e-6


@STAGES
def test_detach_gives_everything_back(stage: int) -> None:
    for found in run_ranks(f"{HERE}:detached", stage=stage):  # in processes where no other engine is attached
        assert found == {
            "replaced": True,
            "restored": True,
            "left over": [],
            "checkpointing": [False] * 3,
            "unequal": [],
        }


@pytest.mark.parametrize("block", [None, {"enabled": False}])
def test_no_block_no_change(ranks: RankPool, block: dict[str, Any] | None) -> None:
    assert ranks.run(f"{HERE}:untouched", block=block) == [{"hilore": False, "patched": []}] * 2


def test_install(ranks: RankPool) -> None:
    assert ranks.run(f"{HERE}:installed", number=0) == [[True, True]] * 2


def test_a_script_started_through_the_module(tmp_path: Path) -> None:
    import json
    import subprocess
    import sys

    from tests.ranks import ENVIRONMENT, ROOT

    script = tmp_path / "script.py"
    settings = config(0) | {"train_micro_batch_size_per_gpu": 1, "hilore": {"memory_budget": "1.1x"}}
    script.write_text(
        "import json, sys, deepspeed\nfrom tests.models import llama\n"
        "engine, *_ = deepspeed.initialize(model=llama(), config=json.loads(sys.argv[1]))\n"
        "print('controller', hasattr(engine, 'hilore'))\n"
    )
    import os

    environment = (
        os.environ | ENVIRONMENT | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)}
    )
    environment["MASTER_PORT"] = "29719"
    command = [sys.executable, "-m", "ds_hilore", str(script), json.dumps(settings)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "controller True" in ran.stdout, ran.stderr[-2000:]
