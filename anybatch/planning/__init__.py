"""Chooses a strategy: the fastest that fits the memory.

Open `strategy.py` first (what there is to choose), then `planner.py`. `candidates.py` searches, `measure.py` compiles
and times, `budget.py` says what a gradient may take, `store.py` keeps what was measured on disk, `plan.py` has the
`Plan` that people see, and `running.py` runs the chosen strategy.
"""
