"""The GPT that `anybatch demo` and `anybatch train` run.

Open `job.py` first: one training run, from its settings (`config.py`) and its text (`text.py`) to its report.
"""
