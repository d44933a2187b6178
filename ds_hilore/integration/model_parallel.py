"""Ranks that share one copy of the model agree on which units are replayed (design fact 16).

A replay repeats the collectives of a unit's forward on the tensor-parallel group, so either all ranks of that group
replay a call of a unit or none does. Before each microbatch they combine what their plans say, by one small all-reduce
on a gloo group of their own: what any of them must replay is replayed by all. Budgets, plans, and the choice between
replaying with and without kept outputs stay each rank's own.

What would make a rank replay more on its own after that is off: the reactions of the budget guard (an allocation that
fails is `MemoryExhausted` at once, and the other ranks wait in vain), trials, pruning, and replays without dead work.
Compression, ZeRO-3 and other kinds of groups are refused (`faults_of_groups`).
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_hilore.core.errors import RankMismatch
from ds_hilore.core.fabric import ControlPlane
from ds_hilore.core.host_rules import model_parallel_faults
from ds_hilore.core.treatment import treatment_of
from ds_hilore.core.types import Action, Plan, UnitId

_log = logging.getLogger(__name__)

TIME_LIMIT_S = 600.0  # ranks of one tensor-parallel group are in step to begin with

#: Calls of units that ranks can agree to store; what comes after them is replayed.
MAX_CALLS = 1024

#: Microbatches after which the cost is said.
SAID_AFTER = 10

#: What hosts call them, newest first (DeepSpeed's `utils/bwc.py`).
_SIZES = (
    "get_tensor_model_parallel_world_size",
    "get_slice_parallel_world_size",
    "get_model_parallel_world_size",
)
_GROUPS = ("get_tensor_model_parallel_group", "get_slice_parallel_group", "get_model_parallel_group")

#: Other groups whose ranks communicate inside of a layer, by what an mpu calls their size.
_OTHERS = {
    "get_sequence_parallel_world_size": "sequence parallelism",
    "get_context_parallel_world_size": "context parallelism",
    "get_expert_model_parallel_world_size": "expert parallelism",
}


def tensor_parallel_size(mpu: Any) -> int:
    """Ranks that share one copy of the layers: what DeepSpeed asks an `mpu` for. 1 where there is none."""
    size = _first_of(mpu, _SIZES)
    return 1 if size is None else int(size())


def tensor_parallel_ranks(mpu: Any) -> tuple[int, ...]:
    """Ranks of the job that hold shards of the same layers, this one included; () where nothing is shared, or the mpu
    does not say by whom."""
    group = _first_of(mpu, _GROUPS)
    if group is None or tensor_parallel_size(mpu) == 1:
        return ()
    return tuple(dist.get_process_group_ranks(group()))


def faults_of_groups(engine: Any, compresses: bool) -> list[str]:
    """What an engine's groups of ranks have that is refused, each with its way out.

    Args:
        compresses: plans may compress.
    """
    if (size := engine.autotp_size() if hasattr(engine, "autotp_size") else 1) > 1:
        return [f"AutoTP over {size} ranks, which communicate inside a unit: use ZeRO-3 to shard the model"]
    if (size := getattr(engine, "sequence_parallel_size", 1)) > 1:
        return [f"sequence parallelism over {size} ranks, which communicate inside a unit: set it to 1"]
    mpu = getattr(engine, "mpu", None)
    found = [
        f"{kind} over {size} ranks, which communicate inside a unit without agreeing on replays: set it to 1"
        for name, kind in _OTHERS.items()
        if (size := _size(mpu, name)) > 1
    ]
    if (size := tensor_parallel_size(mpu)) > 1:
        found += model_parallel_faults(size, engine.zero_optimization_stage(), compresses, _splits_inputs())
        if not tensor_parallel_ranks(mpu):
            found.append(
                f"its mpu splits the model over {size} ranks and does not say which: give it "
                "get_model_parallel_group(), or use ZeRO-3 to shard the model"
            )
    return found


def _splits_inputs() -> bool:
    """Whether `deepspeed.checkpointing.configure` was told to split unit inputs, by a JSON or in code."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    return bool(checkpointing.PARTITION_ACTIVATIONS)


def _first_of(mpu: Any, names: Sequence[str]) -> Callable[[], Any] | None:
    return next((getattr(mpu, name) for name in names if hasattr(mpu, name)), None)


def _size(mpu: Any, name: str) -> int:
    return int(getattr(mpu, name)()) if hasattr(mpu, name) else 1


class GroupAgreement:
    """Which calls of units the ranks of one tensor-parallel group store, asked once per microbatch by all of them.

    Args:
        plane: to all ranks of the job; the group is made through it, hence by all ranks together.
        ranks: of this rank's group.
        units: paths of all unit modules, in the same order on every rank of the group.

    Attributes:
        seconds: how long each of the first `SAID_AFTER` answers took.

    Raises:
        RankMismatch: ranks of a group have other units or another group, or do not make it in time.

    Implements `ReplayAgreement` (runtime/parts.py).
    """

    def __init__(self, plane: ControlPlane, ranks: Sequence[int], units: Sequence[str]) -> None:
        self._modules = [UnitId(unit) for unit in units]
        self._ranks = list(ranks)
        self._known: tuple[list[UnitId], int] = ([], 0)  # calls of the newest answer, and their digest
        self.seconds: list[float] = []
        mine = [self._ranks, list(units)]
        everyones = plane.exchange("tensor-parallel groups", mine)
        for rank in self._ranks:
            if everyones[rank] != mine:
                raise RankMismatch(
                    f"rank {plane.rank} shares its layers with ranks {self._ranks}, and rank {rank} has other units or "
                    "another tensor-parallel group: give the same model and mpu on all of them"
                )
        self._group: Any = None
        limit = datetime.timedelta(seconds=TIME_LIMIT_S)
        for members in sorted({tuple(ranks) for ranks, _ in everyones}):  # all ranks make all groups, in one order
            group = dist.new_group(list(members), backend="gloo", timeout=limit)
            if list(members) == self._ranks:
                self._group = group

    def stored(self, plan: Plan, calls: Iterable[UnitId]) -> frozenset[UnitId]:
        """See `ReplayAgreement`. Ranks that list other calls than each other replay all of them."""
        started = time.perf_counter()
        known, digest = self._listed(calls)
        ballot = torch.zeros(2 + MAX_CALLS, dtype=torch.int64)
        ballot[0], ballot[1] = digest, -digest  # the largest of each: the same list everywhere, or not
        replayed = [treatment_of(plan, call).action is Action.RECOMPUTE for call in known]
        ballot[2 : 2 + len(known)] = torch.tensor(replayed, dtype=torch.int64)
        try:
            dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise RankMismatch(
                f"ranks {self._ranks} share their layers, and not all of them came to agree on which units this "
                f"microbatch replays: {error}"
            ) from error
        self._note(time.perf_counter() - started)
        largest, least, *votes = ballot.tolist()
        if largest != -least:
            return frozenset()
        return frozenset(call for call, vote in zip(known, votes) if not vote)

    def _listed(self, calls: Iterable[UnitId]) -> tuple[list[UnitId], int]:
        """The calls that are voted on, and a number that stands for them."""
        listed = list(dict.fromkeys((*self._modules, *calls)))[:MAX_CALLS]
        if listed != self._known[0]:
            text = "\n".join(map(str, listed))
            self._known = listed, int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)
        return self._known

    def _note(self, seconds: float) -> None:
        if len(self.seconds) >= SAID_AFTER:
            return
        self.seconds.append(seconds)
        if len(self.seconds) == SAID_AFTER and dist.get_rank() == self._ranks[0]:
            _log.info(
                "hilore: agreeing on replays with ranks %s takes %.2f ms per microbatch (median of %d)",
                self._ranks,
                1e3 * statistics.median(self.seconds),
                SAID_AFTER,
            )

    def close(self) -> None:
        """Gives the group back."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
