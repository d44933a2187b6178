"""What the "hilore" block and the rest of a DeepSpeed JSON mean together: refusals, and keys that lose their effect.

Refused, each with its way out (design facts 6 and 16): what has not been proven to work with saved-tensor hooks, and
what makes ranks communicate inside a unit. Features that a JSON cannot switch on (Domino layers, `engine.compile()`,
`no_sync`) are refused where they are met, in integration/.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from ds_hilore.core.config import HiLoReConfig
from ds_hilore.core.errors import UnsupportedError

CHECKPOINTING_BLOCK = "activation_checkpointing"


class Refusal(NamedTuple):
    """A setting of the DeepSpeed JSON that is refused when it is switched on (true, a block, or a size above 1)."""

    path: tuple[str, ...]
    feature: str
    reason: str
    way_out: str


_HOOKS = "it compiles or replaces the code around the saved-tensor hooks, which is not proven"
_GROUP = "ranks of a group communicate inside a unit, so their plans may not differ; that is not supported yet"

REFUSALS: tuple[Refusal, ...] = (
    Refusal(("compile", "deepcompile"), "DeepCompile", _HOOKS, "set it to false"),
    Refusal(("compile", "enabled"), "torch.compile of the whole model", _HOOKS, "compile inside the units instead"),
    Refusal(("compile", "autoep_non_moe"), "torch.compile of AutoEP regions", _HOOKS, "set it to false"),
    Refusal(("zero_optimization", "zenflow"), "ZenFlow", "it is not proven with per-rank plans", "remove the block"),
    Refusal(
        ("zero_optimization", "offload_optimizer", "super_offload"),
        "SuperOffload",
        "it is not proven with per-rank plans",
        "set it to false (plain optimizer offload works)",
    ),
    Refusal(("tensor_parallel", "autotp_size"), "tensor parallelism", _GROUP, "use ZeRO-3 to shard the model"),
    Refusal(("sequence_parallel_size",), "sequence parallelism", _GROUP, "set it to 1"),
    Refusal(("expert_parallel", "enabled"), "expert parallelism", _GROUP, "use ZeRO-3 to shard the experts"),
)

#: Keys of DeepSpeed's own block that a plan takes the place of, and what happens in their stead.
SUPERSEDED: Mapping[str, str] = {
    "number_checkpoints": "superseded: every unit is planned by itself",
    "contiguous_memory_optimization": "superseded: kept state is planned and freed unit by unit",
    "synchronize_checkpoint_boundary": "superseded: nothing waits for the device between units",
    "profile": "superseded: the plan's own measurements take its place",
    "cpu_checkpointing": "superseded by plans: inputs go to host memory where they must (hilore.host_budget)",
}


def check_against_ds_json(config: HiLoReConfig, ds: Mapping[str, Any], model_parallel_size: int = 1) -> list[str]:
    """Compares the block with the rest of the DeepSpeed JSON. "auto" values that Trainer has yet to fill are passed by.

    Args:
        config: the parsed block; a disabled one is compared with nothing.
        ds: the whole DeepSpeed JSON.
        model_parallel_size: ranks that share one copy of the model, where the host knows it (an `mpu`).

    Returns:
        One line per key of `activation_checkpointing` that has no effect, or another one, to be named at start.

    Raises:
        UnsupportedError: one line per setting that cannot be combined, with the way out.
    """
    if not config.enabled:
        return []
    found = [_refused(rule, value) for rule in REFUSALS if _is_on(value := _lookup(ds, rule.path))]
    checkpointing = _lookup(ds, (CHECKPOINTING_BLOCK,))
    keys: Mapping[str, Any] = checkpointing if isinstance(checkpointing, Mapping) else {}
    if model_parallel_size > 1:
        splits = _is_on(keys.get("partition_activations"))
        found += model_parallel_faults(model_parallel_size, zero_stage(ds), config.compresses, splits)
    if found:
        raise UnsupportedError("this DeepSpeed JSON cannot be combined with hilore:\n  " + "\n  ".join(found))
    return [line for key, value in keys.items() if (line := _effect(str(key), value))]


def model_parallel_faults(size: int, stage: int, compresses: bool, splits_inputs: bool) -> list[str]:
    """What cannot be had where several ranks share one copy of the layers, one line each, with the way out.

    Args:
        size: those ranks; above 1.
        stage: of ZeRO.
        compresses: plans may compress.
        splits_inputs: DeepSpeed's checkpointing was told to partition activations.
    """
    found = []
    if stage == 3:
        found.append(
            f"ZeRO-3 beside an mpu that splits layers over {size} ranks is not supported yet: use ZeRO-0, 1 or 2, or "
            "ZeRO-3 without tensor parallelism"
        )
    if compresses:
        found.append(
            f"hilore.max_gradient_error above 0 where an mpu splits layers over {size} ranks is not supported yet, the "
            "error of shards is not calibrated: set it to 0"
        )
    if splits_inputs:
        found.append(
            f"{CHECKPOINTING_BLOCK}.partition_activations = true: it splits unit inputs over the {size} model-parallel "
            "ranks, which is not supported yet; set it to false"
        )
    return found


def zero_stage(ds: Mapping[str, Any]) -> int:
    """The ZeRO stage that a DeepSpeed JSON names; 0 where it names none, or "auto"."""
    stage = _lookup(ds, ("zero_optimization", "stage"))
    return 0 if stage is None or isinstance(stage, str) else int(stage)


def _effect(key: str, value: Any) -> str | None:
    """What becomes of one key of `activation_checkpointing`. None where it is off, or a comment."""
    path = f"{CHECKPOINTING_BLOCK}.{key}"
    if key == "partition_activations":
        no_effect = "without effect: there are no model-parallel ranks to split unit inputs over"
        return f"{path} = {value!r} is {no_effect}" if _is_on(value) else None
    if key in SUPERSEDED:
        return f"{path} = {value!r} is {SUPERSEDED[key]}" if value else None
    known = [*SUPERSEDED, "partition_activations"]
    close = difflib.get_close_matches(key, known, n=1)
    hint = f'; did you mean "{close[0]}"?' if close else ""
    return f"{path} is no key that DeepSpeed reads{hint}"


def _refused(rule: Refusal, value: Any) -> str:
    return f"{'.'.join(rule.path)} = {value!r}: {rule.feature} is refused, {rule.reason}; {rule.way_out}"


def _lookup(ds: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    node: Any = ds
    for name in path:
        if not isinstance(node, Mapping):
            return None
        node = node.get(name)
    return node


def _is_on(value: Any) -> bool:
    """True, a size above 1, or a block; not false, null, 0, 1, "auto"."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value > 1
    return isinstance(value, Mapping)
