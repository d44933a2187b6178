"""All faults, in the order of their table."""

from __future__ import annotations

from tests.faults.kinds import between, engines, files, memory, microbatch, numbers, planning, ranks, refused
from tests.faults.records import Fault

MODULES = (microbatch, memory, numbers, between, engines, planning, files, ranks, refused)
FAULTS: tuple[Fault, ...] = tuple(fault for module in MODULES for fault in module.FAULTS)
BY_NAME: dict[str, Fault] = {fault.name: fault for fault in FAULTS}
