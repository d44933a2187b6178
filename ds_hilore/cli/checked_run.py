"""`hilore doctor --run`: one checked update of the model under the JSON, in a process of its own.

    python -m ds_hilore.cli.checked_run SPEC OUT

The process runs a rehearsal (integration/rehearsal.py) until plans are followed, and one update more, of which the
self-check compares the gradients with the plain model's. A process, since what is looked for may end it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_hilore.cli.findings import Finding, Severity
from ds_hilore.cli.worker import STDERR, worker_environment
from ds_hilore.core.errors import GradientMismatch, HiLoReError, MemoryExhausted

if TYPE_CHECKING:
    from ds_hilore.integration.rehearsal import Rehearsal

#: A microbatch where nobody says which.
TOKENS = (2, 64)
#: Seconds after which the process is ended.
TIME_LIMIT_S = 1800.0
#: What a launcher says of its job: the process is a job of its own, of one rank.
_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Request:
    """What is run. `tokens`: sequences of a microbatch, and their length."""

    ds: Mapping[str, Any]
    model: str
    tokens: tuple[int, int]


def check_run(request: Request, time_limit_s: float = TIME_LIMIT_S) -> Finding:
    """The verdict of a checked update on this machine, one rank, adapters being trained."""
    alone = worker_environment(_LAUNCHERS)
    with tempfile.TemporaryDirectory(prefix="hilore-doctor-") as folder:
        spec, out = Path(folder) / "spec.json", Path(folder) / "out.json"
        spec.write_text(json.dumps(asdict(request)), encoding="utf-8")
        worker = [sys.executable, "-m", "ds_hilore.cli.checked_run", str(spec), str(out)]
        try:
            done = subprocess.run(worker, env=alone, stdout=STDERR, timeout=time_limit_s, check=False)
        except subprocess.TimeoutExpired:
            said = f"the checked update was not over after {time_limit_s:.0f} s"
            return Finding(said, request.model, "give smaller --tokens, or a model with fewer layers")
        if out.exists():
            found = json.loads(out.read_text(encoding="utf-8"))
            return Finding(found["what"], found["where"], found["remedy"], Severity(found["severity"]))
    code = done.returncode
    ended = f"by signal {-code}; memory may have run out" if code < 0 else f"with code {code}; its output is above"
    remedy = "give smaller --tokens, use ZeRO-3 or offload; please report what no such thing explains"
    return Finding(f"the process of the checked update ended {ended}", request.model, remedy)


def take(request: Request) -> Finding:
    """Runs it in this process."""
    from ds_hilore.cli.rehearse import rehearse
    from ds_hilore.core.types import Shape
    from ds_hilore.integration.outlook import Training
    from ds_hilore.integration.rehearsal import Subject

    training = Training(Shape(*request.tokens), world_size=1)
    subject = Subject(request.model, request.ds, training, checked_updates=1)
    try:
        return _verdict(rehearse(subject), request.model)
    except GradientMismatch as error:
        remedy = 'please report it; until the cause is found, "enabled": false trains without plans'
        return Finding(str(error), request.model, remedy)
    except MemoryExhausted as error:
        return Finding(str(error), request.model, "give smaller --tokens, use ZeRO-3 or offload")
    except HiLoReError as error:
        return Finding(str(error), request.model, "mend what the message says, then look again")


def _verdict(rehearsal: Rehearsal, model: str) -> Finding:
    """One more update, of which a unit at least is stored: what replays everything tells little."""
    from ds_hilore.core.types import Action, UnitId
    from ds_hilore.runtime.budget import all_units

    check, hilore = rehearsal.engine._hilore_host.selfcheck, rehearsal.hilore
    note = ""
    if not check.over:
        last = UnitId(hilore.measurements.roster[-1][0].name)
        hilore.force(all_units([last], Action.STORE))
        rehearsal.update()
        note = "; the plan replays every unit here, so one was stored for the check"
    if not check.updates:
        what = f"the update could not be checked: {check.passed_over}"
        remedy = "its gradients may be right all the same; docs/troubleshooting.md, The self-check"
        return Finding(what, model, remedy, Severity.NOTE)
    how = f"at most {check.largest:.1e} off" if check.largest else "to the last bit"
    return Finding(
        f"an update of {rehearsal} has the plain model's gradients, {how}{note}", model, "none needed", Severity.SOUND
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the verdict of the request in SPEC to OUT."""
    spec, out = sys.argv[1:] if arguments is None else arguments
    told = json.loads(Path(spec).read_text(encoding="utf-8"))
    found = take(Request(told["ds"], told["model"], (told["tokens"][0], told["tokens"][1])))
    Path(out).write_text(json.dumps(found.as_json()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
