"""The user's model under the user's JSON, in an engine of its own on this machine: updates that change nothing.

For `hilore profile` and `hilore bench`. Tokens are random, the loss is GRPO's first pass over its data (ratios of 1),
and the learning rate is 0: the optimizer steps, the parameters stay. Started by hand it is a job of one rank; under a
launcher it has that launcher's ranks.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_hilore.core.config import BLOCK
from ds_hilore.core.errors import ConfigError, HiLoReError, UnsupportedError, UsageError
from ds_hilore.core.host_rules import zero_stage
from ds_hilore.integration.causal import LogProbs
from ds_hilore.integration.outlook import Training, config_of, filled_in, own_dtype, with_adapters
from ds_hilore.objective.grpo import GRPOLossConfig
from ds_hilore.runtime.controller import Controller
from ds_hilore.runtime.current import grpo_loss
from ds_hilore.runtime.parts import Stage

_log = logging.getLogger(__name__)

#: Top-level keys of a DeepSpeed JSON that write somewhere, or print, and change neither bytes nor seconds of an update.
_TELLING = (
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "flops_profiler",
    "comms_logger",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
)
#: Keys of our block that do the same.
_OUR_TELLING = ("report",)

#: Updates after which a run that has not learnt what its units cost is given up: none needs as many.
MOST_UPDATES = 400

#: Names of files that hold weights.
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class Subject:
    """What is rehearsed.

    Args:
        source: a folder with a config.json, or that file; weights are read where the folder has them.
        ds: the DeepSpeed JSON.
        attention: as transformers names it; None: the model's own.
        random_weights: weights are not read even where they are there.
        profile_folder: where what was measured is stored, and read first; None: nowhere.
        checked_updates: of which the self-check compares the gradients with the plain model's.
    """

    source: str
    ds: Mapping[str, Any]
    training: Training
    attention: str | None = None
    random_weights: bool = False
    profile_folder: Path | None = None
    checked_updates: int = 0

    @property
    def folder(self) -> Path:
        named = Path(self.source)
        return named.parent if named.is_file() else named

    @property
    def has_weights(self) -> bool:
        return not self.random_weights and any(any(self.folder.glob(name)) for name in _WEIGHTS)


class Rehearsal:
    """One engine and one microbatch of random tokens.

    Attributes:
        notes: what of the JSON was filled in or left out; one sentence each.

    Raises:
        ConfigError, UnsupportedError, UsageError: the JSON or the model cannot be had on this machine.
    """

    def __init__(self, subject: Subject) -> None:
        _job_environment()
        world = int(os.environ["WORLD_SIZE"])
        device = _device()
        config = config_of(subject.source)
        dtype = own_dtype(subject.ds, subject.training) or torch.float32
        if dtype is torch.float16 and device.type == "cpu":
            raise UsageError("fp16 does not run on CPU: rehearse on a GPU, or with a copy of the JSON that has bf16")
        hidden = int(config.get_text_config().hidden_size)
        settings, self.notes = rehearsed_json(subject, hidden, device, world)
        self.notes.append("weights are the model's own" if subject.has_weights else "weights are random")
        self.shape = subject.training.shape
        self._subject = subject
        # Under ZeRO-3 parameters are whole on the host until they are sharded.
        whole = torch.device("cpu") if zero_stage(settings) == 3 else device
        causal = _model(subject, config, dtype, whole)
        model = causal if subject.training.lora is None else with_adapters(causal, subject.training.lora, dtype)
        let_adapters_matter(model)
        causal.forward = LogProbs(causal, subject.training.whole_logits)
        self.engine = _engine(model.train(), settings)
        self.batch = _Batch.random(subject.training, int(config.get_text_config().vocab_size), self.engine)

    @property
    def hilore(self) -> Controller:
        controller: Controller = self.engine.hilore
        return controller

    @property
    def leads(self) -> bool:
        """Whether this is the rank that speaks."""
        return torch.distributed.get_rank() == 0

    def meet(self) -> None:
        """Waits for all ranks."""
        torch.distributed.barrier()

    def __str__(self) -> str:
        model, facts = self.engine.module, self.as_json()
        return (
            f"{type(model).__name__}, {sum(map(_elements, model.parameters())) / 1e6:,.1f} million parameters; "
            f"ZeRO-{facts['zero_stage']} on {facts['world_size']} {'rank' if facts['world_size'] == 1 else 'ranks'}; "
            f"{facts['microbatches']} x ({self.shape}) tokens an update; {facts['device']}"
        )

    def as_json(self) -> dict[str, Any]:
        """What was run, as plain data."""
        engine = self.engine
        return {
            "model": self._subject.source,
            "segments": self.shape.segments,
            "length": self.shape.length,
            "microbatches": engine.gradient_accumulation_steps(),
            "zero_stage": engine.zero_optimization_stage(),
            "world_size": engine.dp_world_size,
            "device": str(engine.device),
            "trained": "all parameters" if self._subject.training.lora is None else "adapters",
        }

    @property
    def learnt(self) -> bool:
        """Whether plans are followed for good; where they may compress, calibration included."""
        checks = self.engine._hilore_host.checks
        return self.hilore.stage is Stage.PLANNED and (checks is None or checks.calibrated)

    def learn(self) -> Iterator[Stage]:
        """Updates until plans are followed for good, the last one by such a plan; tells the stage before each.

        Raises:
            UnsupportedError: it learns nothing.
        """
        learnt = False
        for _ in range(MOST_UPDATES):
            yield self.hilore.stage
            self.update()  # the first plan that compresses begins a trial
            before, learnt = learnt, self._everywhere(self.learnt)
            if before and learnt:
                return
        raise UnsupportedError(
            f"after {MOST_UPDATES} updates the run has not learnt what its units cost (stage "
            f"{self.hilore.stage.value}); run `hilore doctor` with the same JSON and model"
        )

    def _everywhere(self, here: bool) -> bool:
        """Whether it is so on all ranks: they learn each for itself, and must make the same number of updates."""
        flag = torch.tensor(int(here), device=self.engine.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN)
        return bool(flag.item())

    def update(self) -> float:
        """One whole update. Gives the seconds of forward, loss, backward and step of all its microbatches."""
        engine, batch = self.engine, self.batch
        microbatches = engine.gradient_accumulation_steps()
        parts = microbatches * engine.dp_world_size
        started = self._now()
        for _ in range(microbatches):
            logps = engine(input_ids=batch.ids, scored=batch.mask)
            loss = grpo_loss(
                logps,
                batch.old_logps,
                batch.advantages,
                batch.mask,
                batch.tokens * parts,
                config=GRPOLossConfig(),
                engine=engine,
            )
            engine.backward(loss * parts)
            engine.step()
        return self._now() - started

    def _now(self) -> float:
        if self.engine.device.type != "cpu":
            torch.get_device_module(self.engine.device).synchronize()
        return time.perf_counter()


@dataclass(frozen=True)
class _Batch:
    """ids [B, T] int64; mask and old log-probabilities [B, T - 1]; advantages [B]; half of every row is prompt."""

    ids: Tensor
    mask: Tensor
    old_logps: Tensor
    advantages: Tensor

    @property
    def tokens(self) -> Tensor:
        return self.mask.sum()

    @classmethod
    def random(cls, training: Training, vocabulary: int, engine: Any) -> _Batch:
        """Old log-probabilities are the model's own, so that no token is clipped."""
        rows, length = training.shape.segments, training.shape.length
        rank = torch.distributed.get_rank()
        generator = torch.Generator().manual_seed(rank)
        ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
        mask = torch.zeros(rows, length - 1, dtype=torch.bool)
        mask[:, length // 2 :] = True
        advantages = torch.randn(rows, generator=generator)
        ids, mask, advantages = (tensor.to(engine.device) for tensor in (ids, mask, advantages))
        with torch.no_grad():
            old_logps = engine(input_ids=ids, scored=mask)
        return cls(ids, mask, old_logps.detach(), advantages)


# -- the JSON ------------------------------------------------------------------------------------------------------


def rehearsed_json(
    subject: Subject, hidden: int, device: torch.device, world_size: int = 1
) -> tuple[dict[str, Any], list[str]]:
    """The JSON as it is rehearsed, and a sentence for what is not as it stands there.

    Filled in as the Trainer fills it; without what writes or prints; a learning rate of 0; one budget for all ranks
    where the list of them is of another size; profiles in the subject's folder.
    """
    filled, notes = filled_in(subject.ds, subject.training, hidden)
    block = filled.get(BLOCK)
    ours = dict(block) if isinstance(block, Mapping) else {}
    if not ours or ours.pop("enabled", True) is False:
        notes.append(f'the JSON has no "{BLOCK}" block that is enabled: rehearsed with its defaults')
    for key in (*_OUR_TELLING, "enabled"):
        ours.pop(key, None)
    ours["profile"] = {
        **(ours.get("profile") or {}),
        "path": None if subject.profile_folder is None else str(subject.profile_folder),
    }
    ours["selfcheck"] = {"updates": subject.checked_updates}
    budgets = ours.get("memory_budget")
    if isinstance(budgets, list) and budgets and len(budgets) != world_size:
        ours["memory_budget"] = budgets[0]
        notes.append(f"memory_budget lists {len(budgets)} ranks and {world_size} are here: rank 0's is rehearsed")
    settings = {key: value for key, value in _without_auto(filled).items() if key not in _TELLING}
    for key in ("train_batch_size", "scheduler"):
        settings.pop(key, None)
    settings["train_micro_batch_size_per_gpu"] = subject.training.shape.segments
    settings["steps_per_print"] = 10**9
    settings["optimizer"] = _still(settings, device)
    settings[BLOCK] = ours
    return settings, notes


def _without_auto(value: Any) -> Any:
    """What a host would still have filled in is left to DeepSpeed's defaults."""
    if isinstance(value, Mapping):
        return {key: _without_auto(inner) for key, inner in value.items() if inner != "auto"}
    return value


def _still(settings: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The JSON's optimizer with a learning rate of 0."""
    found = dict(settings.get("optimizer") or {"type": "AdamW"})
    found["params"] = {**(found.get("params") or {}), "lr": 0.0}
    offloads = bool((settings.get("zero_optimization") or {}).get("offload_optimizer"))
    if device.type == "cpu" and not offloads and str(found.get("type", "")).lower() in ("adam", "adamw"):
        found["params"].setdefault("torch_adam", True)  # DeepSpeed's own would be compiled first
    return found


# -- the engine ----------------------------------------------------------------------------------------------------


def _model(subject: Subject, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    chosen: dict[str, Any] = {"dtype": dtype}
    if subject.attention is not None:
        chosen["attn_implementation"] = subject.attention
    try:
        if subject.has_weights:
            causal: Any = AutoModelForCausalLM.from_pretrained(subject.folder, **chosen).to(device)
        else:
            with device:
                causal = AutoModelForCausalLM.from_config(config, **chosen)
    except (OSError, ValueError, TypeError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedError(
            f"{subject.source}: not a causal language model that transformers makes here ({reason}); name the folder "
            "of one"
        ) from error
    if causal.base_model is causal or causal.get_output_embeddings() is None:
        raise UnsupportedError(f"{type(causal).__name__} has no body and head of its own; use benchmarks of your own")
    return causal


def let_adapters_matter(model: nn.Module) -> None:
    """lora_B starts at 0, so that lora_A would have no gradient at all in the first update."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def _engine(model: nn.Module, settings: Mapping[str, Any]) -> Any:
    from ds_hilore.integration.deepspeed_engine import initialize

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        engine, *_ = initialize(model=model, model_parameters=trained, config=dict(settings))
    except (HiLoReError, torch.OutOfMemoryError):
        raise
    except (AssertionError, ImportError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"DeepSpeed makes no engine of this JSON on this machine: {reason}") from error
    return engine


def _elements(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def quieten_hosts() -> None:
    """DeepSpeed tells every setting of an engine at level INFO, on stdout."""
    import deepspeed.utils

    deepspeed.utils.logger.setLevel(logging.WARNING)


def _device() -> torch.device:
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _job_environment() -> None:
    """What a launcher sets, for a single rank, where none has."""
    if "RANK" not in os.environ:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda":
        torch.cuda.set_device(local)
    elif not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
