"""Runs learners' code in separate processes, within limits, and asks those processes about it through connections.

Open `submissions` first: it has `Runner` and `Submission`, which the grader uses. `fork_server` is the process that
forks the others, `isolation` the limits on them, and `evidence` what they find out about a learner's function.
"""
