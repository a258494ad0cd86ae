"""Chooses the strategy of a gradient: the fastest one, or the leanest one, that fits into memory.

Open `strategy.py` first: it defines what is chosen, and `problem.py` what it is chosen for. `planner.py` makes the
decision; it searches with `candidates.py`, which compiles and times strategies with `measure.py` and keeps them within
the memory that `budget.py` allows. `store.py` keeps measurements on disk, `plan.py` has the `Plan` that users print,
and `running.py` runs the chosen strategy.
"""
