"""L1: which variant each recovery unit gets. Plain Python data in and out; never sees a tensor or a module.

problem.py states the question and judges answers; greedy.py answers at once, program.py (PuLP) exactly and later,
brute_force.py is the oracle of the tests, background.py keeps the exact programme off the critical path.
"""
