"""Wrong configs and misuses, one function each; `CASES` says what they must raise (test_misuse.py)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import ds_hilore
from ds_hilore.core import deps
from ds_hilore.core.config import HiLoReConfig
from ds_hilore.core.types import Action, Plan, UnitId
from ds_hilore.integration.deepspeed_engine import attach
from tests.engines import config, engine
from tests.integration.updates import hilore_engine, units_of
from tests.models import batch, decoder_layers, llama, plain_loss


def _model() -> nn.Module:
    return llama(layers=2)


def small_engine(stage: int = 0, action: Action | None = Action.RECOMPUTE, model: nn.Module | None = None) -> Any:
    made = hilore_engine(_model() if model is None else model, config(stage))
    made.hilore.force(action)
    return made


def _loss(made: Any, seed: int = 1) -> Tensor:
    return plain_loss(made, *batch(seed))


def _start(block: dict[str, Any] | None = None, model: nn.Module | None = None, **json: Any) -> None:
    hilore_engine(_model() if model is None else model, config(0) | json, **(block or {}))


# -- the start -----------------------------------------------------------------------------------------------------


def unknown_key() -> None:
    _start({"memory_budgt": "1.1x"})


def impossible_budget() -> None:
    _start({"memory_budget": "0.5x"})


def more_error_than_there_is_gradient() -> None:
    _start({"max_gradient_error": 1.0})


def budgets_for_another_number_of_ranks() -> None:
    _start({"memory_budget": ["1.1x", "1.2x", "1.3x"]})


def units_that_match_nothing() -> None:
    _start({"units": ["GPT9Block"]})


def unit_with_a_forward_of_its_own() -> None:
    model = _model()
    mlp = decoder_layers(model)[0].mlp
    mlp.forward = lambda x: x  # type: ignore[union-attr, assignment]
    _start({"units": ["LlamaMLP"]}, model)


def deepcompile() -> None:
    _start(compile={"deepcompile": True})


def tensor_parallelism() -> None:
    _start(tensor_parallel={"autotp_size": 2})


def compiled_model() -> None:
    _start(model=torch.compile(_model()))  # type: ignore[arg-type]


def model_compiled_in_place() -> None:
    model = _model()
    model.compile()
    _start(model=model)


def compiled_unit() -> None:
    model = _model()
    decoder_layers(model)[1].compile()
    _start(model=model)


def units_named_in_a_pipeline() -> None:
    from deepspeed.pipe import PipelineModule

    _start({"units": ["Linear"]}, PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=1))


def old_package() -> None:
    deps.installed_version.cache_clear()
    original = deps.importlib.metadata.version
    deps.importlib.metadata.version = lambda name: "0.18.2" if name == "deepspeed" else original(name)
    try:
        _start()
    finally:
        deps.importlib.metadata.version = original
        deps.installed_version.cache_clear()


def missing_package() -> None:
    original = deps.importlib.util.find_spec
    deps.has.cache_clear()
    deps.importlib.util.find_spec = lambda name, *rest: None if name == "mpi4py" else original(name, *rest)
    try:
        deps.require("mpi4py")
    finally:
        deps.importlib.util.find_spec = original
        deps.has.cache_clear()


# -- engines -------------------------------------------------------------------------------------------------------


def attached_twice() -> None:
    attach(small_engine(), HiLoReConfig(), config(0))


def attached_to_a_foreign_zero3_engine() -> None:
    attach(engine(_model(), config(3)), HiLoReConfig(), config(3))


def attached_to_a_model_parallel_engine() -> None:
    made = engine(_model(), config(0))
    made.mpu = SimpleNamespace(get_model_parallel_world_size=lambda: 2)  # one rank: what it says is all that is read
    attach(made, HiLoReConfig(), config(0))


def attached_to_a_compiled_engine() -> None:
    made = engine(_model(), config(0))
    made.compile()
    attach(made, HiLoReConfig(), config(0))


def engine_compiled_later() -> None:
    small_engine().compile()


def model_compiled_later() -> None:
    made = small_engine()
    made.module.compile()
    _loss(made)


def no_sync_under_zero2() -> None:
    with small_engine(2).no_sync():
        pass


def no_sync_under_zero3() -> None:
    with small_engine(3).no_sync():
        pass


# -- plans and facts -----------------------------------------------------------------------------------------------


def compression_forced() -> None:
    small_engine().hilore.force(Action.COMPRESS)


def unknown_codec() -> None:
    _start({"max_gradient_error": 0.01, "codecs": ["int7"]})


def plan_by_letter() -> None:
    small_engine().hilore.force("R")


def plan_with_compression() -> None:
    made = small_engine()
    unit = UnitId(units_of(made)[1])
    made.hilore.force(Plan(choice={unit: "L"}, actions={unit: Action.COMPRESS}))
    _loss(made)


def observed_without_grad() -> None:
    made = small_engine()
    _loss(made)
    ds_hilore.observe_logps(torch.zeros(2, 5))


def observed_with_a_foreign_mask() -> None:
    made = small_engine()
    logps = made(input_ids=batch(1)[0]).logits[..., 0]
    ds_hilore.observe_logps(logps, torch.ones(2, 3))


def advantages_of_another_length() -> None:
    small_engine()
    ds_hilore.begin_update([torch.ones(2)], [torch.ones(2, 4)] * 2, 8)


def weights_of_another_length() -> None:
    small_engine()
    ds_hilore.begin_update([torch.ones(2)], [torch.ones(2, 4)], 8, weights=[])


def advantages_for_other_rows() -> None:
    small_engine()
    ds_hilore.begin_microbatch(torch.ones(3), torch.ones(2, 4), 8)


def mask_without_rows() -> None:
    small_engine()
    ds_hilore.begin_microbatch(torch.ones(2), torch.ones(2), 2)


def told_to_an_engine_without_block() -> None:
    """Two engines: the block is the other one's."""
    small_engine()
    ds_hilore.begin_update([torch.ones(2)], [torch.ones(2, 4)], 8, engine=engine(_model(), config(0)))


def loss_of_other_shapes() -> None:
    made = small_engine()
    logps = made(input_ids=batch(1)[0]).logits[..., 0]
    settings = ds_hilore.GRPOLossConfig()
    ds_hilore.grpo_loss(logps, logps.detach()[:, 1:], torch.ones(2), torch.ones(2, 16), 32, config=settings)


# -- between forward and backward ----------------------------------------------------------------------------------


def _edit_hidden(action: Action, layer: int) -> None:
    """Changes in place what layer 0 gives to layer 1, after the forward."""
    made = small_engine(action=action)
    noted: list[Tensor] = []
    decoder_layers(made.module)[layer].register_forward_pre_hook(lambda _, args: noted.append(args[0]))
    loss = _loss(made)
    with torch.no_grad():
        noted[0].add_(1)
    made.backward(loss)


def unit_input_edited_under_store() -> None:
    _edit_hidden(Action.STORE, 1)


def unit_output_edited() -> None:
    _edit_hidden(Action.RECOMPUTE, 1)


def backward_after_a_step() -> None:
    made = small_engine(2)
    first, second = _loss(made, 1), _loss(made, 2)
    made.backward(first)
    made.step()
    made.backward(second)


def saved_parameter_edited() -> None:
    made = small_engine()
    loss = _loss(made)
    with torch.no_grad():
        decoder_layers(made.module)[1].mlp.up_proj.weight.mul_(2)  # type: ignore[union-attr]
    made.backward(loss)


def unsaved_parameter_edited() -> None:
    """No bundle holds a bias; a replay would read the new one."""
    made = small_engine(model=llama(layers=2, mlp_bias=True))
    loss = _loss(made)
    with torch.no_grad():
        decoder_layers(made.module)[1].mlp.up_proj.bias.add_(1)  # type: ignore[union-attr]
    made.backward(loss)


class Fickle(nn.Module):
    """An activation that computes in double precision from its second call on."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.silu(x) if self.calls == 1 else nn.functional.silu(x.double()).float()


def unit_that_changes_between_calls() -> None:
    model = _model()
    decoder_layers(model)[0].mlp.act_fn = Fickle()  # type: ignore[union-attr]
    made = small_engine(model=model)
    made.backward(_loss(made))


#: misuse -> (error, words of its message)
CASES: dict[Callable[[], None], tuple[str, tuple[str, ...]]] = {
    unknown_key: ("ConfigError", ("hilore.memory_budgt", 'did you mean "memory_budget"')),
    impossible_budget: ("ConfigError", ("hilore.memory_budget = '0.5x'", "1.0x")),
    more_error_than_there_is_gradient: ("ConfigError", ("hilore.max_gradient_error = 1.0", "less than 1")),
    budgets_for_another_number_of_ranks: ("ConfigError", ("3 entries", "1 ranks", "one entry per rank")),
    units_that_match_nothing: ("ConfigError", ('"GPT9Block" matches no module', "LlamaDecoderLayer")),
    unit_with_a_forward_of_its_own: ("ConfigError", ("LlamaMLP", "`forward` of its own")),
    attached_to_a_model_parallel_engine: ("UnsupportedError", ("splits the model over 2 ranks", "ZeRO-3")),
    deepcompile: ("UnsupportedError", ("compile.deepcompile = True", "set it to false")),
    tensor_parallelism: ("UnsupportedError", ("tensor_parallel.autotp_size = 2", "ZeRO-3")),
    compiled_model: ("UnsupportedError", ("whole model is under torch.compile", "inside a decoder layer")),
    model_compiled_in_place: ("UnsupportedError", ("whole model is under torch.compile",)),
    compiled_unit: ("UnsupportedError", ("torch.compile around a unit", "model.layers.1", "inside the unit")),
    units_named_in_a_pipeline: ("ConfigError", ("hilore.units", "activation_checkpoint_interval")),
    old_package: ("DependencyMissing", ("deepspeed 0.18.2 is older than 0.18.3", "pip install")),
    missing_package: ("DependencyMissing", ("mpi4py is not installed", "ds_hilore[mpi]")),
    attached_twice: ("UsageError", ("has a hilore controller already", "detach")),
    attached_to_a_foreign_zero3_engine: ("UnsupportedError", ("ZeRO-3", "ds_hilore.initialize")),
    attached_to_a_compiled_engine: ("UnsupportedError", ("engine.compile() was called",)),
    engine_compiled_later: ("UnsupportedError", ("engine.compile()", "detach")),
    model_compiled_later: ("UnsupportedError", ("whole model is under torch.compile",)),
    no_sync_under_zero2: ("UnsupportedError", ("no_sync under ZeRO-2", "gradient_accumulation_steps")),
    no_sync_under_zero3: ("UnsupportedError", ("no_sync under ZeRO-3", "gradient_accumulation_steps")),
    compression_forced: ("UsageError", ("compress needs codecs", "L:mlp=bf16")),
    unknown_codec: ("ConfigError", ("hilore.codecs", "['int7'] are not known", "bf16")),
    plan_by_letter: ("UsageError", ("'R' is no plan", "Action")),
    plan_with_compression: ("UsageError", ("'L' names no variant",)),
    observed_without_grad: ("UsageError", ("observe_logps", "no gradient")),
    observed_with_a_foreign_mask: ("UsageError", ("mask has shape (2, 3)", "(2, 16)")),
    advantages_of_another_length: ("UsageError", ("1 advantages, 2 masks", "one entry per microbatch")),
    weights_of_another_length: ("UsageError", ("0 weights", "one entry per microbatch")),
    advantages_for_other_rows: ("UsageError", ("advantages has shape (3,)", "(2, 4)")),
    mask_without_rows: ("UsageError", ("mask must be [rows, tokens]", "(2,)")),
    told_to_an_engine_without_block: ("UsageError", ("begin_update", "engine")),
    loss_of_other_shapes: ("UsageError", ("old_logps", "(2, 15)")),
    unit_input_edited_under_store: ("StateChanged", ("unit model.layers.1 (rank 0)", "changed in place")),
    unit_output_edited: ("StateChanged", ("unit model.layers.1 (rank 0)", "(2, 16, 64)", "changed in place")),
    backward_after_a_step: ("StateChanged", ("unit model.layers.1", "stepped or loaded", "run the forward again")),
    saved_parameter_edited: ("StateChanged", ("parameter", "changed")),
    unsaved_parameter_edited: ("StateChanged", ("unit model.layers.1 (rank 0)", "parameter or buffer")),
    unit_that_changes_between_calls: (
        "RecoveryMismatch",
        ("unit model.layers.0 (rank 0): saved tensor", "float64", "the same work twice"),
    ),
}
