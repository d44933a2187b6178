"""Imported by the server of forks: everything that a rank of the suite needs. Nothing here starts a thread.

DeepSpeed's operator is loaded here too: a rank that is killed while it loads would leave a lock file behind, for which
every later rank of this machine waits.
"""

from deepspeed.comm.torch import build_shm_op

from tests.faults import bench, driver, endings, suite

build_shm_op()

__all__ = ["bench", "driver", "endings", "suite"]
