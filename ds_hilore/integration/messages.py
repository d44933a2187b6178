"""What all control planes of several ranks have in common: questions, answers, and what becomes of a plane that failed.

# NOTE [Control plane]
# C1: every exchange is one all-gather of a message of fixed size, and a second one only where a payload is larger.
# C2: a message carries a sequence number and the name of its question. All ranks see all messages, so ranks that are
#     at different questions all find out in the same exchange.
# C3: nothing waits longer than the time limit. Where a rank did not come in time the plane has failed for good: ranks
#     are out of step, and another exchange could answer one question with another's payload.
#     Different questions leave it usable (C2): nobody has been answered, and all know it.
#     So does a rank whose update starts again: it says so with its next question (`update_restarts`). Ranks that are
#     elsewhere learn it there, all in the same exchange, and start theirs again too; the one that was first asks again.
# C4: payloads travel as JSON, never as pickles: data of other ranks is not executed.
"""

from __future__ import annotations

import contextlib
import json
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_hilore.core.errors import RankMismatch, UsageError
from ds_hilore.core.fabric import SAME_START

#: Size of the first message. Fingerprints, counts and budgets fit; only large payloads need a second one.
MESSAGE_BYTES = 512

#: Longest name of a question, in UTF-8.
_QUESTION_BYTES = 64

# Sequence number, length of the question, length of the payload, whether the sender's update starts again.
_HEADER = struct.Struct("<QHI?")
INLINE_BYTES = MESSAGE_BYTES - _HEADER.size - _QUESTION_BYTES

#: How long ranks that have given up wait for word of the others that have given up too.
BLAME_WAIT_S = 1.0


@dataclass(frozen=True)
class Message:
    """What one rank sends first in an exchange (C1, C2)."""

    sequence: int
    question: str
    body: bytes
    restarts: bool = False

    def encode(self) -> bytes:
        """MESSAGE_BYTES long; the body is left out where it does not fit."""
        question = self.question.encode()
        inline = self.body if len(self.body) <= INLINE_BYTES else b""
        header = _HEADER.pack(self.sequence, len(question), len(self.body), self.restarts)
        return (header + question.ljust(_QUESTION_BYTES, b"\0") + inline).ljust(MESSAGE_BYTES, b"\0")


@dataclass(frozen=True)
class Received:
    sequence: int
    question: str
    body_bytes: int
    inline: bytes
    restarts: bool

    @staticmethod
    def decode(message: bytes) -> Received:
        sequence, question_bytes, body_bytes, restarts = _HEADER.unpack_from(message)
        start = _HEADER.size
        question = message[start : start + question_bytes].decode()
        inline = message[start + _QUESTION_BYTES :][:body_bytes] if body_bytes <= INLINE_BYTES else b""
        return Received(sequence, question, body_bytes, inline, restarts)


class MessagePlane(ABC):
    """A control plane over a channel that gathers messages; what the channel is, its subclass says.

    A disagreement found by `agree`, ranks at different questions and a restarted update leave the plane usable: all
    ranks are in step and know the same. After a rank was late or gone, every further call raises at once (C3).

    Args:
        rank, world_size: of the job.
        time_limit_s: seconds after which a rank that does not answer is given up.

    Raises:
        UsageError: a time limit that is no positive number.
    """

    def __init__(self, rank: int, world_size: int, time_limit_s: float) -> None:
        if time_limit_s <= 0:
            raise UsageError(f"time_limit_s = {time_limit_s}: must be above 0")
        self.rank = rank
        self.world_size = world_size
        self.time_limit_s = time_limit_s
        self._sequence = 0
        self._failure: str | None = None
        self._restarts = False  # this rank's update starts again, and ranks do not know it yet
        self._node: tuple[int, ...] = ()

    # -- the channel -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _gather(self, content: bytes, size: int) -> list[bytes]:
        """`content`, filled up to `size` bytes, of every rank.

        Raises:
            RuntimeError, ValueError: a rank does not come.
        """

    @abstractmethod
    def _silent_ranks(self) -> list[int]:
        """Ranks that have not given up the exchange as this one has: late or dead. Empty if it cannot be told."""

    @abstractmethod
    def _find_node(self) -> tuple[int, ...]:
        """See `node_ranks`. A collective of all ranks."""

    @abstractmethod
    def _shut(self, failed: bool) -> None:
        """Lets go of the channel."""

    # -- the protocol ----------------------------------------------------------------------------------------------

    def update_restarts(self) -> None:
        """See `core.fabric.ControlPlane.update_restarts`."""
        self._restarts = True

    def exchange(self, what: str, payload: Any) -> list[Any]:
        """See `core.fabric.ControlPlane.exchange`. One collective of 512 bytes per rank where payloads are small.

        Raises:
            RankMismatch: a rank did not answer within the time limit, is gone, or is at another question; or its update
                starts again, and this one's must too.
            UsageError: `payload` cannot be written as JSON, or `what` is longer than 64 bytes.
        """
        body = to_json(what, payload)
        if len(what.encode()) > _QUESTION_BYTES:
            raise UsageError(f"the question {what!r} is longer than {_QUESTION_BYTES} bytes; give it a shorter name")
        self._refuse_after_failure(what)
        received = self._ask(what, body)
        while len({answer.restarts for answer in received}) > 1:
            if not self._restarts:
                self._restarts = True
                raise _restarted(what, received)
            received = self._ask(what, body)
        self._refuse_other_questions(received)
        self._restarts = False
        longest = max(answer.body_bytes for answer in received)
        if longest <= INLINE_BYTES:
            return [json.loads(answer.inline) for answer in received]
        with self._giving_up(what):
            bodies = self._gather(body, longest)
        return [json.loads(text[: answer.body_bytes]) for answer, text in zip(received, bodies)]

    def _ask(self, what: str, body: bytes) -> list[Received]:
        self._sequence += 1
        with self._giving_up(what):
            messages = self._gather(Message(self._sequence, what, body, self._restarts).encode(), MESSAGE_BYTES)
        return [Received.decode(message) for message in messages]

    def agree(self, what: str, payload: Any, remedy: str = SAME_START) -> None:
        """See `core.fabric.ControlPlane.agree`.

        Raises:
            RankMismatch: on every rank, one line per key that differs, with the values and the ranks that hold them.
            UsageError: `payload` is no dict, or cannot be written as JSON.
        """
        if not isinstance(payload, Mapping):
            raise UsageError(f"agree({what!r}) compares a dict key by key, and got a {type(payload).__name__}")
        found = differences(self.exchange(what, payload))
        if found:
            lines = "\n".join(f"  {line}" for line in found)
            raise RankMismatch(f"ranks disagree on {what}:\n{lines}\n{remedy}")

    def node_ranks(self) -> tuple[int, ...]:
        """See `core.fabric.ControlPlane.node_ranks`.

        Raises:
            RankMismatch: see `exchange`.
        """
        if not self._node:
            self._node = self._find_node()
        return self._node

    def close(self) -> None:
        """Ends the plane. Harmless when called again, or after a failure."""
        failed = self._failure is not None
        self._failure = self._failure or "it was closed"
        self._shut(failed)

    # -- failures --------------------------------------------------------------------------------------------------

    def _refuse_other_questions(self, received: Sequence[Received]) -> None:
        places = [f"{answer.question!r} (exchange {answer.sequence})" for answer in received]
        if len(set(places)) > 1:
            raise RankMismatch(
                f"rank {self.rank} of {self.world_size}: ranks are at different questions: {_by_value(places)}; "
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
        """Turns what the channel raises for a rank that is late or gone into a RankMismatch."""
        start_s = time.monotonic()
        try:
            yield
        except (RuntimeError, ValueError) as error:
            waited_s = time.monotonic() - start_s
            silent = self._silent_ranks()
            who = f"no sign of {ranks_text(silent)}" if silent else "which rank cannot be told"
            cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self._fail(
                f"not every rank answered {what!r} (exchange {self._sequence}) within {waited_s:.1f} s "
                f"(time limit {self.time_limit_s:g} s): {who}; look at the output of that rank first. Cause: {cause}"
            )


def _restarted(what: str, received: Sequence[Received]) -> RankMismatch:
    restarts = [rank for rank, answer in enumerate(received) if answer.restarts]
    return RankMismatch(
        f"no answer to {what!r}: the update starts again on {ranks_text(restarts)}, whose own error says why; "
        "this rank's was given up too: run it again from its first microbatch on every rank"
    )


def to_json(what: str, payload: Any) -> bytes:
    """A payload as it travels.

    Raises:
        UsageError: it cannot be written as JSON.
    """
    try:
        return json.dumps(payload, sort_keys=True).encode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"the payload of {what!r} cannot be written as JSON: {error}") from None


def differences(answers: Sequence[Mapping[str, Any]]) -> list[str]:
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
    return "; ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in holders.items())


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 2", and after eight of them how many more."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
