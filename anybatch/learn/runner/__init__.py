"""Where learners' code runs: in a process of its own, held by limits, asked through a pipe."""
