"""The job that a DeepSpeed JSON and a model's config.json describe, without weights, without a run, without a device.

The model is built on the meta device, adapters included, so its parameters, units and gated MLPs are those of a real
run; bytes of saved state come from the geometry of its layers (integration/architecture.py).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ds_hilore.core.config import BLOCK, HiLoReConfig
from ds_hilore.core.errors import UnsupportedError, UsageError
from ds_hilore.core.host_rules import check_against_ds_json
from ds_hilore.core.types import Shape, UnitId
from ds_hilore.integration.architecture import Setting, layer_number, read_model
from ds_hilore.integration.gated_mlp import apply_gated_mlps, undo_gated_mlps
from ds_hilore.integration.units import find_units
from ds_hilore.integration.zero_facts import facts_of_config
from ds_hilore.memory.arithmetic import zero_account
from ds_hilore.memory.ledger import Entry, Item
from ds_hilore.memory.reduction import growing_gradients, transient_gradients
from ds_hilore.memory.zero import ZeroFacts
from ds_hilore.objective.head import default_chunk_tokens
from ds_hilore.profiling.cost_model import DeviceSpeed, head_costs, layer_costs
from ds_hilore.profiling.geometry import Attention, LayerGeometry, ModelGeometry
from ds_hilore.profiling.job import Job, Layer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: What peft calls every linear layer but the head.
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Lora:
    """Adapters as peft makes them. `targets`: names of modules, or "all-linear"; `alpha`: which changes no byte."""

    rank: int = 16
    targets: str | tuple[str, ...] = ALL_LINEAR
    dropout: float = 0.0
    alpha: int = 8


@dataclass(frozen=True)
class Training:
    """How the model is trained, as far as neither its config nor the JSON says.

    Args:
        shape: of one microbatch.
        world_size: data-parallel ranks.
        lora: None: every parameter is trained.
        dtype: for `"auto"` in the JSON; one of `DTYPES`.
        accumulation: microbatches per update, where the JSON leaves them to the host.
        attention: None: as transformers chooses for the model.
        padded: batches come with a mask.
        whole_logits: the loss makes logits of all tokens at once, instead of chunks.
        foreign_bytes: of the device that others hold.
    """

    shape: Shape
    world_size: int = 1
    lora: Lora | None = field(default_factory=Lora)
    dtype: str = "bf16"
    accumulation: int = 1
    attention: Attention | None = None
    padded: bool = False
    whole_logits: bool = False
    foreign_bytes: int = 0


@dataclass(frozen=True)
class Outlook:
    """A job with what it was read from.

    Args:
        assumptions: what was taken to be so because nothing said otherwise; one sentence each.
        superseded: keys of the JSON that lose their effect under plans.
    """

    job: Job
    facts: ZeroFacts
    units: str
    kind: str
    assumptions: tuple[str, ...]
    superseded: tuple[str, ...]


def model_of_config(source: str, lora: Lora | None, dtype: torch.dtype | None) -> nn.Module:
    """A causal language model on the meta device, from its config alone.

    Args:
        source: a folder with a config.json, that file, or a name that transformers knows.
        dtype: of all parameters; None: as the config says.

    Raises:
        UsageError: there is no config, or the adapters' targets are not in the model.
        UnsupportedError: it is not one of a causal language model.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(source)
    try:
        with torch.device("meta"):
            chosen = {} if dtype is None else {"dtype": dtype}
            model: nn.Module = AutoModelForCausalLM.from_config(config, **chosen)
    except (ValueError, TypeError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedError(f"{source}: not a causal language model that transformers builds ({reason})") from error
    if lora is None:
        return model.train()
    with torch.device("meta"):
        return with_adapters(model.train(), lora, dtype)


def config_of(source: str) -> Any:
    """The transformers config of a folder, of its config.json, or of a name that transformers knows.

    Raises:
        UsageError: there is none.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{source}: no config.json that transformers can read ({reason}); name its folder") from error


def with_adapters(model: nn.Module, lora: Lora, dtype: torch.dtype | None) -> nn.Module:
    """The model with adapters, of `dtype` where one is given, as DeepSpeed casts them.

    Raises:
        UsageError: their targets are not in the model.
    """
    from peft import LoraConfig, get_peft_model

    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        adapted: nn.Module = get_peft_model(model, settings)
    except ValueError as error:
        raise UsageError(f"adapters on {lora.targets}: {str(error).splitlines()[0]}") from error
    return adapted if dtype is None else adapted.to(dtype)


def outlook(
    source: str, ds: Mapping[str, Any], training: Training, speed: DeviceSpeed, device: str = "cuda"
) -> Outlook:
    """Reads everything; runs nothing.

    Args:
        source: as for `model_of_config`.
        ds: the DeepSpeed JSON. What it leaves to the Trainer ("auto") is filled as the Trainer fills it.
        device: type of the device that the job would run on.

    Raises:
        ConfigError, UnsupportedError, UsageError: the JSON cannot be honoured, or the model cannot be read.
    """
    config = HiLoReConfig.from_ds_json(ds)
    assumptions = []
    if config is None:
        config = HiLoReConfig()
        assumptions.append(f'the JSON has no "{BLOCK}" block that is enabled: defaults are planned with')
    superseded = check_against_ds_json(config, ds)
    own = own_dtype(ds, training)
    model = model_of_config(source, training.lora, own)
    filled, notes = filled_in(ds, training, hidden=int(_text_config(model).hidden_size))
    assumptions += notes
    units = find_units(model, config.units)
    facts = facts_of_config(filled, model, units.modules, world_size=training.world_size, device=device)
    layers, kind, more = _layers(model, units.names, facts, training)
    account = zero_account(facts)
    if training.foreign_bytes:
        account = account.with_entries([Entry(Item.FOREIGN, training.foreign_bytes)])
    geometry = _geometry(model, training)
    job = Job(layers, head_costs(geometry.head), account, training.shape, speed, facts.accumulation)
    return Outlook(job, facts, units.summary(), kind, (*assumptions, *more), tuple(superseded))


# -- the JSON ------------------------------------------------------------------------------------------------------


def filled_in(ds: Mapping[str, Any], training: Training, hidden: int) -> tuple[dict[str, Any], list[str]]:
    """The JSON with what it leaves to a host, as transformers' Trainer fills it, and a sentence for each.

    Source: transformers.integrations.deepspeed: HfTrainerDeepSpeedConfig.trainer_config_finalize.

    Args:
        hidden: hidden size of the model, of which the Trainer makes ZeRO's sizes.
    """
    filled, notes = copy.deepcopy(dict(ds)), []
    for name in ("bf16", "fp16"):
        block = filled.get(name)
        if isinstance(block, dict) and block.get("enabled") == "auto":
            block["enabled"] = training.dtype == name
            notes.append(f"{name}.enabled is left to the host: {block['enabled']} (--dtype {training.dtype})")
    if filled.get("gradient_accumulation_steps", "auto") == "auto":
        filled["gradient_accumulation_steps"] = _accumulation(filled, training)
        notes.append(f"microbatches per update: {filled['gradient_accumulation_steps']}")
    zero = filled.get("zero_optimization")
    if isinstance(zero, dict):
        sizes = {"reduce_bucket_size": hidden * hidden}
        if zero.get("stage") == 3:
            sizes["stage3_prefetch_bucket_size"] = int(0.9 * hidden * hidden)
            sizes["stage3_param_persistence_threshold"] = 10 * hidden
        for key, size in sizes.items():
            if zero.get(key) == "auto":
                zero[key] = size
                notes.append(f"zero_optimization.{key} is left to the host: {size:,}, as the Trainer sets it")
    if not isinstance(filled.get("optimizer"), Mapping):
        notes.append("the JSON names no optimizer: AdamW")
    return filled, notes


def _accumulation(ds: Mapping[str, Any], training: Training) -> int:
    total, own = ds.get("train_batch_size"), ds.get("train_micro_batch_size_per_gpu")
    if isinstance(total, int) and isinstance(own, int) and total and own:
        return max(1, total // (own * training.world_size))
    return training.accumulation


def own_dtype(ds: Mapping[str, Any], training: Training) -> torch.dtype | None:
    """What DeepSpeed casts the model to; None: it leaves it alone."""
    for name in ("bf16", "fp16"):
        block = ds.get(name)
        enabled = block.get("enabled") if isinstance(block, Mapping) else None
        if enabled is True or (enabled == "auto" and training.dtype == name):
            return DTYPES[name]
    return None


# -- the model -----------------------------------------------------------------------------------------------------


def _text_config(model: nn.Module) -> Any:
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _geometry(model: nn.Module, training: Training) -> ModelGeometry:
    vocabulary, tokens = int(_text_config(model).vocab_size), training.shape.tokens
    chunk = None if training.whole_logits else min(tokens, default_chunk_tokens(vocabulary, tokens))
    setting = Setting(
        attention=training.attention, padded=training.padded, longest=training.shape.length, chunk_tokens=chunk
    )
    return read_model(model, setting)


def _layers(
    model: nn.Module, names: Mapping[nn.Module, tuple[str, str]], facts: ZeroFacts, training: Training
) -> tuple[tuple[Layer, ...], str, list[str]]:
    """The units that are decoder layers, what their costs were read from, and a sentence for whatever is not so."""
    geometry, notes = _geometry(model, training), []
    growing, transient = growing_gradients(facts), transient_gradients(facts)
    if geometry.generic:
        notes.append(f"layers of this family are not known: read as {geometry.kind}")
    lean, layers = set(apply_gated_mlps(names)), []
    undo_gated_mlps(lean)
    left_out = 0
    for module, (path, label) in names.items():
        number = layer_number(module, path)
        if number is None or number >= len(geometry.layers):
            left_out += 1
            continue
        own = _as_unit(geometry.layers[number], module, lean)
        plain, ours = layer_costs(geometry.layers[number]), layer_costs(own)
        layers.append(Layer(UnitId(path), label, ours, plain, growing.get(path, 0), transient.get(path, 0)))
    if not layers:
        raise UnsupportedError("no recovery unit is a numbered decoder layer, so there is nothing to count with")
    if left_out:
        notes.append(f"{left_out} units that are no decoder layers are not counted")
    adapters = geometry.layers[0].adapters
    if adapters is not None and adapters.experts:
        notes.append(
            "peft merges adapted experts: every layer saves a merged copy of all its experts; name other targets"
        )
    return tuple(layers), geometry.kind, notes


def _as_unit(layer: LayerGeometry, module: nn.Module, lean: set[nn.Module]) -> LayerGeometry:
    """A layer with the MLP that it has while it is a unit of ours."""
    gated = layer.experts is None and any(child in lean for child in module.modules())
    return replace(layer, gated_function=gated)
