"""What does not work, in one place: printed at start and by `hilore doctor`, and listed in the docs."""

from __future__ import annotations

from dataclasses import dataclass

from ds_hilore.core.host_rules import REFUSALS


@dataclass(frozen=True)
class Limit:
    """Something that is refused or has no effect, and what to do instead."""

    what: str
    way_out: str


#: Limits that no key of a JSON switches on.
_IN_CODE = (
    Limit("Compression in a pipeline, or in backwards not through engine.backward", "none needed: exact actions"),
    Limit("Compression of units that save what the data decides (experts)", "none needed: exact actions"),
    Limit("Offload of saved state (host_budget) on CPU, in pipelines and in mode paper", "none needed: it stays"),
    Limit("memory_budget of less than the peak of recomputing everything", "a larger budget; ZeRO-3 or its offload"),
    Limit("torch.compile around a unit, engine.compile(), compiled autograd", "compile inside the units"),
    Limit("Domino layers", "ordinary layers with ZeRO"),
    Limit("DualPipeV; tensor parallelism inside of pipeline stages", "a PipelineModule of pipe and data axes only"),
    Limit("Tensor parallelism (an mpu) with ZeRO-3, compression or split unit inputs", "ZeRO-0, 1 or 2; exact actions"),
    Limit("Megatron-Core: context, expert, pipeline parallelism, fp8, distribute_saved_activations", "leave them out"),
    Limit("Pruning in a pipeline, and going on after an exception in train_batch", "a restart from a checkpoint"),
    Limit("Pruning of units with a router or dropout", "none needed: they are replayed whole"),
    Limit("no_sync on ZeRO-2 and ZeRO-3", "gradient_accumulation_steps"),
    Limit("A second backward over one forward", "retain_graph=True in the first"),
)


def known_limits() -> tuple[Limit, ...]:
    """All limits: those of the DeepSpeed JSON (`core/host_rules.py`) and those met in code."""
    in_json = tuple(Limit(f"{rule.feature} ({'.'.join(rule.path)})", rule.way_out) for rule in REFUSALS)
    return _IN_CODE + in_json
