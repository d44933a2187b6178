"""L1: which variant each recovery unit gets. Plain Python data in and out; never sees a tensor or a module.

problem.py states the question and judges answers. greedy.py answers one question at once, program.py (PuLP) exactly and
later, brute_force.py is the oracle of the tests. frontier.py answers all questions of an update before they are asked,
from prices (dual.py), refine.py has them improved by the programme, reaction.py decides on true numbers after forward.
price.py splits an update's risk among microbatches and ranks; margin.py learns how far predictions are off.
background.py and apart.py keep all that takes long off the critical path and out of the training process.
"""
