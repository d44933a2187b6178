"""Checks of `hilore doctor` on a DeepSpeed JSON, a model and an engine, by the library's own rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ds_hilore.cli.account import gigabytes
from ds_hilore.cli.findings import Finding, Severity
from ds_hilore.core.config import BLOCK, HiLoReConfig
from ds_hilore.core.errors import ConfigError, UnsupportedError, UsageError
from ds_hilore.core.host_rules import CHECKPOINTING_BLOCK, check_against_ds_json

_CONFIGURATION = "write what the message allows; docs/configuration.md has every key"


def check_json(ds: Mapping[str, Any]) -> list[Finding]:
    """The block, and the rest of the JSON together with it."""
    try:
        config = HiLoReConfig.from_ds_json(ds)
    except ConfigError as error:
        return [Finding(line, BLOCK, _CONFIGURATION) for line in str(error).splitlines()]
    if config is None:
        return [_no_block(ds)]
    try:
        notes = check_against_ds_json(config, ds)
    except UnsupportedError as error:
        return [_refused_key(line) for line in str(error).splitlines()[1:]]
    found = [Finding(note, CHECKPOINTING_BLOCK, "remove the key", Severity.NOTE) for note in notes]
    if config.max_gradient_error > 0 and not config.compresses:
        what = f"max_gradient_error = {config.max_gradient_error:g}, and yet nothing may be compressed"
        remedy = 'leave out "mode": "exact", name codecs, and set profile.calibration_microbatches above 0'
        found.append(Finding(what, f"{BLOCK}.max_gradient_error", remedy, Severity.NOTE))
    return found


def _no_block(ds: Mapping[str, Any]) -> Finding:
    for name, inner in ds.items():
        if isinstance(inner, Mapping) and BLOCK in inner:
            what = f'the "{BLOCK}" block is inside "{name}", where nobody reads it'
            return Finding(what, f"{name}.{BLOCK}", "move it to the top level of the JSON")
    if BLOCK in ds:
        return Finding("the block is switched off", f"{BLOCK}.enabled", 'remove "enabled": false')
    return Finding(
        f'there is no "{BLOCK}" block', "top level of the JSON", f'add "{BLOCK}": {{"memory_budget": "1.10x"}}'
    )


def _refused_key(line: str) -> Finding:
    """A line of a refusal: "key = value: reason; way out"."""
    reason, _, way_out = line.strip().rpartition("; ")
    return Finding(reason or line.strip(), reason.partition(" = ")[0], way_out)


def check_source(source: str, config: HiLoReConfig, zero_stage: int) -> list[Finding]:
    """A model of which only the config is there, every parameter trained.

    Raises:
        UsageError: there is no config that can be read.
    """
    from ds_hilore.integration.outlook import model_of_config

    try:
        model = model_of_config(source, None, None)
    except UnsupportedError as error:
        remedy = "name a causal language model of transformers; of another model, name the units and look in the run"
        return [Finding(str(error).removeprefix(f"{source}: "), source, remedy)]
    return check_model(model, config, zero_stage)


def check_budget(source: str, ds: Mapping[str, Any], tokens: tuple[int, int], world: int) -> list[Finding]:
    """Whether the budget holds the model with every unit replayed, LoRA adapters (which need least) being trained.

    Args:
        tokens: sequences of a microbatch, and their length.
        world: data-parallel ranks.
    """
    from ds_hilore.cli.answer import machine_of, own_answer
    from ds_hilore.core.types import Shape
    from ds_hilore.integration.outlook import Training, outlook

    where = f"{BLOCK}.memory_budget"
    machine = machine_of()
    try:
        seen = outlook(source, ds, Training(Shape(*tokens), world_size=world), machine.speed)
        answer = own_answer(seen, ds, world, machine)
    except (ConfigError, UnsupportedError, UsageError) as error:  # a list of another size; layers that nobody knows
        remedy = "say --world as the job has it; `hilore plan` shows the rest"
        return [Finding(str(error), where, remedy, Severity.NOTE)]
    if answer.refused is None:
        return []
    least, missing = answer.refused.min_bytes, answer.refused.missing_bytes
    what = (
        f"the budget of {gigabytes(answer.budget_bytes)} is {gigabytes(missing)} less than replaying every unit needs "
        f"for {tokens[0]} x {tokens[1]} tokens"
    )
    return [Finding(what, where, f"write at least {least}, or use smaller microbatches, ZeRO-3, or its offload")]


def check_model(model: nn.Module, config: HiLoReConfig, zero_stage: int) -> list[Finding]:
    """A model before DeepSpeed sees it: what is trained, its units, what is refused around them."""
    from ds_hilore.integration.peft import feeds_from_frozen_embedding
    from ds_hilore.integration.refusals import refuse_model
    from ds_hilore.integration.units import find_units

    name = type(model).__name__
    found = []
    if not any(parameter.requires_grad for parameter in model.parameters()):
        remedy = "train adapters (peft), or call requires_grad_(True) on what is to be trained"
        found.append(Finding("no parameter is trained, so no unit has a backward", name, remedy))
    try:
        units = find_units(model, config.units)
    except ConfigError as error:
        return [*found, Finding(str(error), f"{BLOCK}.units", "name a class or path of this model, or leave it out")]
    if not units.modules:
        remedy = f'name them: "{BLOCK}": {{"units": ["YourLayerClass"]}}; Megatron-Core: recompute_granularity="full"'
        found.append(Finding("no module is checkpointed by its host, so there are no units", name, remedy))
    if zero_stage == 3 and feeds_from_frozen_embedding(model) and not hasattr(model, "enable_input_require_grads"):
        remedy = "give the model enable_input_require_grads(), or let the embedding's outputs require grad by a hook"
        found.append(Finding("a frozen embedding feeds the first ZeRO-3 unit", name, remedy))
    try:
        refuse_model(model, units.modules)
    except UnsupportedError as error:
        found += _refused_objects(error, name)
    return found


def _refused_objects(error: UnsupportedError, where: str) -> list[Finding]:
    """Lines of integration/refusals.py: "what: way out"."""
    parts = [line.strip().rpartition(": ") for line in str(error).splitlines()[1:]]
    return [Finding(what, where, way_out) for what, _, way_out in parts]
