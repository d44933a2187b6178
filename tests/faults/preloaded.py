"""Imported by the server of forks: everything that a rank of the suite needs. Nothing here starts a thread."""

from tests.faults import bench, driver, endings, suite

__all__ = ["bench", "driver", "endings", "suite"]
