"""L1: tensors held in fewer bits. Knows no unit, no plan and no GRPO; import from the files by their names.

base.py is the interface, registry.py finds a codec by name. Each codec is a folder of three files: reference.py (torch,
the default on the CPU), kernel.py (Triton, the default on CUDA; gives the same codes bit for bit) and codec.py. Shared
ground of the twins: layout.py (strides), grid.py (blocks that stay in cache), scaled.py and plain.py (torch),
tiles/kernel.py (Triton).
"""
