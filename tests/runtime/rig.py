"""A controller without any engine: torch layers as units, a clock and a meter that say what they are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ds_hilore.core.budget import BudgetKind, MemoryBudget
from ds_hilore.core.types import Solver
from ds_hilore.memory.meter import PeakMeter
from ds_hilore.planning.program import SolverLimits
from ds_hilore.runtime.budget import RankPlanner
from ds_hilore.runtime.controller import Controller
from ds_hilore.runtime.current import forward_of, running
from ds_hilore.runtime.parts import ControllerParts, Stage
from ds_hilore.runtime.update import GradientScale, MicrobatchFacts

WIDTH = 4


class StubMeter(PeakMeter):
    """Gives the peaks of `script` one after another, the last one for good; counts its resets. `level` is held."""

    def __init__(self, script: Sequence[int] = (1000,), device: int = 10**6) -> None:
        self.script = list(script)
        self.resets = 0
        self.level = 0
        self._device = device

    def reset(self) -> None:
        self.resets += 1

    def peak_bytes(self) -> int:
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def level_bytes(self) -> int:
        return self.level

    def reserved_bytes(self) -> int:
        return 0

    def device_bytes(self) -> int:
        return self._device


@dataclass
class FakeClock:
    """Every span takes `seconds`; `late` spans are told at `collect` only."""

    seconds: float = 1.0
    late: bool = False
    waiting: list[Callable[[float], None]] = field(default_factory=list)

    def start(self) -> float:
        return self.seconds

    def stop(self, started: float, receive: Callable[[float], None]) -> None:
        self.waiting.append(receive)
        if not self.late:
            self.collect()

    def collect(self) -> None:
        waiting, self.waiting = self.waiting, []
        for receive in waiting:
            receive(self.seconds)


class Block(nn.Module):
    """A unit that saves several tensors."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks that run as units of the controller whose forward it is, and plainly outside of any."""

    def __init__(self, blocks: int = 3, frozen: int = 0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        for block in list(self.blocks)[:frozen]:
            block.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            controller = running()
            x = block(x) if controller is None else controller.run_unit(block.forward, (x,), {})
        return x


def planner(multiple: float = 1.0, solver: Solver = Solver.GREEDY) -> RankPlanner:
    return RankPlanner(MemoryBudget(BudgetKind.CHECKPOINT_MULTIPLE, multiple), solver, SolverLimits(1.0, 0.01))


class Rig:
    """A net under a controller. `classes`: the class label of each block."""

    def __init__(self, net: Net | None = None, classes: Sequence[str] = (), **parts: Any) -> None:
        self.net = net or Net()
        labels = [*classes, *["Block"] * (len(self.net.blocks) - len(classes))]
        names = {block: (f"blocks.{k}", labels[k]) for k, block in enumerate(self.net.blocks)}
        self.meter, self.clock = StubMeter(), FakeClock()
        given: dict[str, Any] = {
            "rank": 0,
            "unit_names": names,
            "planner": planner(),
            "meter": self.meter,
            "clock": self.clock,
            "scale": lambda passed_outputs: GradientScale(),
        }
        self.controller = Controller(ControllerParts(**(given | parts)))

    @staticmethod
    def inputs(seed: int = 0, rows: int = 2, tokens: int = 3) -> Tensor:
        return torch.randn(rows, tokens, WIDTH, generator=torch.Generator().manual_seed(seed))

    def forward(self, seed: int = 0, **shape: int) -> Tensor:
        with forward_of(self.controller):
            output = self.net(self.inputs(seed, **shape))
        self.controller.outputs.mark(output)
        return output.square().sum()

    def plain(self, seed: int = 0, **shape: int) -> Tensor:
        return self.net(self.inputs(seed, **shape)).square().sum()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As the engine's `backward`."""
        self.controller.begin_backward()
        loss.backward(**kwargs)
        if not kwargs.get("retain_graph"):
            self.controller.end_backward()

    def update(self, seed: int = 0, **shape: int) -> None:
        self.backward(self.forward(seed, **shape))
        self.controller.end_update()

    def learn(self) -> None:
        """Updates until it follows plans of its own."""
        while self.controller.stage is not Stage.PLANNED:
            self.update()
            self.gradients()

    def gradients(self) -> list[Tensor]:
        """Takes the gradients away."""
        found = []
        for parameter in self.net.parameters():
            if parameter.requires_grad:
                found.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone())
                parameter.grad = None
        return found

    def expected(self, *losses: Tensor) -> list[Tensor]:
        """Gradients of the sum of plain losses, with nothing left behind."""
        trainable = [p for p in self.net.parameters() if p.requires_grad]
        total = torch.autograd.grad(sum(losses[1:], losses[0]), trainable)
        return list(total)

    @property
    def actions(self) -> str:
        """Of the newest microbatch's units in forward order, as in "RRH"."""
        return "".join(action.letter for action in self.controller.microbatch.ran.values())


def facts(number: int) -> MicrobatchFacts:
    return MicrobatchFacts(torch.ones(2), torch.ones(2, 3), float(number))


def told(rig: Rig) -> float | None:
    """`num_tokens` of the newest microbatch's facts."""
    entry = rig.controller.microbatch.facts
    return None if entry is None else float(entry.num_tokens)


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
