"""The control plane on a gloo group of its own, and its form for a job of one rank.

# NOTE [Control plane]
# C1: every exchange is one all-gather of a message of fixed size, and a second one only where a payload is larger.
# C2: a message carries a sequence number and the name of its question. All ranks see all messages, so ranks that are
#     at different questions all find out in the same exchange.
# C3: nothing waits longer than the time limit. What has failed once stays failed: ranks are out of step then, and
#     another exchange could answer one question with another's payload.
# C4: payloads travel as JSON, never as pickles: data of other ranks is not executed.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_hilore.core.errors import RankMismatch, UsageError
from ds_hilore.core.fabric import ControlPlane

TIME_LIMIT_S = 60.0

#: Size of the first message. Fingerprints, counts and budgets fit; only large payloads need a second one.
MESSAGE_BYTES = 512

#: Longest name of a question, in UTF-8.
_QUESTION_BYTES = 64

# Sequence number, length of the question, length of the payload.
_HEADER = struct.Struct("<QHI")
_INLINE_BYTES = MESSAGE_BYTES - _HEADER.size - _QUESTION_BYTES

# How long ranks that have given up wait for word of the others that have given up too.
_BLAME_WAIT_S = 1.0


def control_plane(time_limit_s: float = TIME_LIMIT_S) -> ControlPlane:
    """Makes the control plane of this job. To be called by all ranks together.

    Args:
        time_limit_s: seconds after which a rank that does not answer is given up.

    Raises:
        RankMismatch: a rank did not take part in time.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return SingleRankPlane()
    return GlooControlPlane(time_limit_s)


class SingleRankPlane:
    """Control plane of a job of one rank: agrees with itself."""

    rank = 0
    world_size = 1

    def exchange(self, what: str, payload: Any) -> list[Any]:
        return [json.loads(_to_json(what, payload))]

    def agree(self, what: str, payload: Any) -> None:
        _to_json(what, payload)  # a payload that only one rank could send is a bug on one rank too

    def close(self) -> None:
        return None


@dataclass(frozen=True)
class _Message:
    """What one rank sends first in an exchange (C1, C2)."""

    sequence: int
    question: str
    body: bytes

    def encode(self) -> bytes:
        """MESSAGE_BYTES long; the body is left out where it does not fit."""
        question = self.question.encode()
        inline = self.body if len(self.body) <= _INLINE_BYTES else b""
        header = _HEADER.pack(self.sequence, len(question), len(self.body))
        return (header + question.ljust(_QUESTION_BYTES, b"\0") + inline).ljust(MESSAGE_BYTES, b"\0")


@dataclass(frozen=True)
class _Received:
    sequence: int
    question: str
    body_bytes: int
    inline: bytes

    @staticmethod
    def decode(message: bytes) -> _Received:
        sequence, question_bytes, body_bytes = _HEADER.unpack_from(message)
        start = _HEADER.size
        question = message[start : start + question_bytes].decode()
        inline = message[start + _QUESTION_BYTES :][:body_bytes] if body_bytes <= _INLINE_BYTES else b""
        return _Received(sequence, question, body_bytes, inline)


class GlooControlPlane:
    """Control plane of all ranks of an initialised torch.distributed job. All ranks make it, and ask, in step.

    A disagreement found by `agree` leaves the plane usable: all ranks are in step and know the same. After a rank was
    late, gone or at another question, every further call raises at once (C3).

    Args:
        time_limit_s: seconds after which a rank that does not answer is given up.

    Raises:
        RankMismatch: not all ranks made the plane within the time limit.
    """

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        if time_limit_s <= 0:
            raise UsageError(f"time_limit_s = {time_limit_s}: must be above 0")
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.time_limit_s = time_limit_s
        self._sequence = 0
        self._failure: str | None = None
        self._group: dist.ProcessGroup | None = None
        with self._giving_up("making the control plane"):
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=time_limit_s))

    def exchange(self, what: str, payload: Any) -> list[Any]:
        """See `core.fabric.ControlPlane.exchange`. One collective of 512 bytes per rank where payloads are small.

        Raises:
            RankMismatch: a rank did not answer within the time limit, is gone, or is at another question.
            UsageError: `payload` cannot be written as JSON, or `what` is longer than 64 bytes.
        """
        body = _to_json(what, payload)
        if len(what.encode()) > _QUESTION_BYTES:
            raise UsageError(f"the question {what!r} is longer than {_QUESTION_BYTES} bytes; give it a shorter name")
        self._refuse_after_failure(what)
        self._sequence += 1
        with self._giving_up(what):
            messages = self._gather(_Message(self._sequence, what, body).encode(), MESSAGE_BYTES)
        received = [_Received.decode(message) for message in messages]
        self._refuse_other_questions(received)
        longest = max(answer.body_bytes for answer in received)
        if longest <= _INLINE_BYTES:
            return [json.loads(answer.inline) for answer in received]
        with self._giving_up(what):
            bodies = self._gather(body, longest)
        return [json.loads(text[: answer.body_bytes]) for answer, text in zip(received, bodies)]

    def agree(self, what: str, payload: Any) -> None:
        """See `core.fabric.ControlPlane.agree`.

        Raises:
            RankMismatch: on every rank, one line per key that differs, with the values and the ranks that hold them.
            UsageError: `payload` is no dict, or cannot be written as JSON.
        """
        if not isinstance(payload, Mapping):
            raise UsageError(f"agree({what!r}) compares a dict key by key, and got a {type(payload).__name__}")
        differences = _differences(self.exchange(what, payload))
        if differences:
            raise RankMismatch(
                f"ranks disagree on {what}:\n" + "\n".join(f"  {line}" for line in differences) + "\n"
                "start every rank with the same configuration, model and package versions"
            )

    def close(self) -> None:
        """Ends the group. Harmless when called again, or after a failure."""
        group, self._group = self._group, None
        self._failure = self._failure or "it was closed"
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _gather(self, content: bytes, size: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)
        everyones = [torch.empty(size, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(everyones, mine, group=self._group)
        return [tensor.numpy().tobytes() for tensor in everyones]

    def _refuse_other_questions(self, received: Sequence[_Received]) -> None:
        places = [f"{answer.question!r} (exchange {answer.sequence})" for answer in received]
        if len(set(places)) > 1:
            self._fail(
                f"ranks are at different questions: {_by_value(places)}; "
                "all ranks must make the same calls in the same order: compare their scripts and their data"
            )

    def _refuse_after_failure(self, what: str) -> None:
        if self._failure is not None:
            raise RankMismatch(f"{what!r} cannot be asked, the control plane has failed before: {self._failure}")

    def _fail(self, reason: str) -> None:
        self._failure = f"rank {self.rank} of {self.world_size}: {reason}"
        raise RankMismatch(self._failure) from None

    @contextlib.contextmanager
    def _giving_up(self, what: str) -> Iterator[None]:
        """Turns what gloo and the store raise for a rank that is late or gone into a RankMismatch."""
        start_s = time.monotonic()
        try:
            yield
        except (RuntimeError, ValueError) as error:  # gloo raises RuntimeError, the store also its subclasses
            waited_s = time.monotonic() - start_s
            group = self._group.group_name if self._group is not None else "new"  # equal on all ranks
            silent = _silent_ranks(f"{group}/{self._sequence}", self.rank, self.world_size)
            who = f"no sign of {_ranks(silent)}" if silent else "which rank cannot be told"
            cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self._fail(
                f"not every rank answered {what!r} (exchange {self._sequence}) within {waited_s:.1f} s "
                f"(time limit {self.time_limit_s:g} s): {who}; look at the output of that rank first. Cause: {cause}"
            )


def _silent_ranks(exchange: str, rank: int, world_size: int) -> list[int]:
    """Ranks that have not given up the same exchange as this one: the late or dead ones. Empty if it cannot be told."""
    # The job's store outlives the group. It is gone where its host, usually rank 0, is.
    try:
        c10d = dist.distributed_c10d
        store = c10d.PrefixStore(f"ds_hilore/control_plane/{exchange}", c10d._get_default_store())
        store.set(str(rank), "gave up")
        end_s = time.monotonic() + _BLAME_WAIT_S
        silent = [other for other in range(world_size) if other != rank]
        while silent and time.monotonic() < end_s:
            silent = [other for other in silent if not store.check([str(other)])]
            time.sleep(_BLAME_WAIT_S / 20)
    except (RuntimeError, ValueError):
        return []
    return silent


def _to_json(what: str, payload: Any) -> bytes:
    try:
        return json.dumps(payload, sort_keys=True).encode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"the payload of {what!r} cannot be written as JSON: {error}") from None


def _differences(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per key whose value is not the same on all ranks."""
    lines = []
    for key in sorted({key for answer in answers for key in answer}):
        # Compared as JSON text, so that NaN equals NaN and 1 differs from 1.0.
        values = [json.dumps(answer[key], sort_keys=True) if key in answer else "no such key" for answer in answers]
        if len(set(values)) > 1:
            lines.append(f"{key}: {_by_value(values)}")
    return lines


def _by_value(values: Sequence[str]) -> str:
    """ "30 on ranks 0, 2; 28 on rank 1"."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in holders.items())


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
