"""The launch scripts start real jobs: two ranks on this machine, in the forms in which users start them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import config
from tests.launch.jobs import TRAIN, answers, environment, outcome, run, written
from tests.mpi import MPI_ENVIRONMENT, why_no_mpi
from tests.ranks import ROOT

needs_mpi = pytest.mark.skipif(why_no_mpi() is not None, reason=why_no_mpi() or "")


def arguments(folder: Path) -> list[str]:
    """Of the training script: two updates on ZeRO-2."""
    settings = config(2) | {"hilore": {"memory_budget": "1.10x"}}
    return [TRAIN, "--deepspeed_config", written(folder, "ds.json", settings), "--out", str(folder)]


def check(folder: Path, plane: str) -> None:
    first, second = answers(folder)
    for seen in (first, second):
        assert seen["plane"] == plane and seen["node"] == (0, 1)
        assert seen["actions"] == ["recompute"] * 3  # the first updates measure
        assert len(seen["gradients"]) == 2
    for one, other in zip(first["gradients"], second["gradients"]):  # reduced, hence the same
        assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def script(name: str) -> str:
    return str(ROOT / "launch" / name)


@pytest.mark.parametrize("name", ["run_deepspeed.sh", "run_mpi.sh", "run_slurm.sh"])
def test_without_arguments_a_script_explains_itself(name: str) -> None:
    code, output = outcome([script(name)], environment())
    assert code == 2
    assert f"launch/{name} train.py --deepspeed ds.json" in output and "set -euo" not in output


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "launch").glob("*.sh")))
def test_scripts_are_valid_bash(name: str) -> None:
    assert subprocess.run(["bash", "-n", script(name)], check=False).returncode == 0


def test_deepspeed_on_one_node(tmp_path: Path) -> None:
    run([script("run_deepspeed.sh"), *arguments(tmp_path)], environment(), cwd=tmp_path)
    check(tmp_path, "GlooControlPlane")


def test_deepspeed_on_two_nodes_without_ssh(tmp_path: Path) -> None:
    """Both nodes are this machine: the same command on each, as the head of the script says."""
    hosts = tmp_path / "hosts"
    hosts.write_text("first slots=1\nsecond slots=1\n", encoding="utf-8")
    env = environment(HOSTFILE=str(hosts), MASTER_ADDR="127.0.0.1")
    command = [script("run_deepspeed.sh"), *arguments(tmp_path)]
    other = subprocess.Popen(command, env=env | {"NODE_RANK": "1"}, cwd=tmp_path)
    try:
        run(command, env | {"NODE_RANK": "0"}, cwd=tmp_path)
        assert other.wait(timeout=30) == 0
    finally:
        other.kill()
    check(tmp_path, "GlooControlPlane")


@needs_mpi
def test_mpirun(tmp_path: Path) -> None:
    run([script("run_mpi.sh"), *arguments(tmp_path)], environment(), cwd=tmp_path)
    check(tmp_path, "MpiControlPlane")


@needs_mpi
def test_deepspeed_with_openmpi_as_its_launcher(tmp_path: Path) -> None:
    """DeepSpeed builds the mpirun command and runs it."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n", encoding="utf-8")
    env = environment(**MPI_ENVIRONMENT)
    command = ["deepspeed", "--launcher", "openmpi", "--hostfile", str(hosts), "--force_multi", "--no_ssh_check"]
    command += ["--master_addr", "127.0.0.1", "--launcher_args", "--mca btl_tcp_if_include lo"]
    output = run([*command, "--module", "ds_hilore", *arguments(tmp_path)], env)
    assert "cmd = mpirun -n 2 -hostfile" in output
    check(tmp_path, "MpiControlPlane")


SRUN = """#!{python}
import os, subprocess, sys
tasks = [
    subprocess.Popen(sys.argv[2:], env={{**os.environ, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}})
    for n in range(int(os.environ["SLURM_NTASKS"]))
]
assert sys.argv[1] == "--label"
sys.exit(max(task.wait() for task in tasks))
"""


SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames here[1-2]" ] && printf "127.0.0.1\\nhere2\\n"
"""


def stand_in(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")
    (folder / name).chmod(0o755)


def test_slurm(tmp_path: Path) -> None:
    """Two stand-ins that do what the real ones do with this script's arguments: no Slurm is at hand."""
    stand_in(tmp_path, "srun", SRUN.format(python=sys.executable))
    stand_in(
        tmp_path, "scontrol", '#!/bin/sh\n[ "$*" = "show hostnames here[1-2]" ] && printf "127.0.0.1\\nhere2\\n"\n'
    )
    env = environment(SLURM_JOB_ID="4242", SLURM_JOB_NODELIST="here[1-2]", SLURM_NTASKS="2", SRUN_FLAGS="--label")
    run([script("run_slurm.sh"), *arguments(tmp_path)], env | {"PATH": f"{tmp_path}:{env['PATH']}"}, cwd=tmp_path)
    check(tmp_path, "GlooControlPlane")


def test_slurm_outside_of_an_allocation(tmp_path: Path) -> None:
    code, output = outcome([script("run_slurm.sh"), *arguments(tmp_path)], environment())
    assert code != 0 and "sbatch or salloc" in output
