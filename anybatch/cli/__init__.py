"""The command `anybatch`.

Open `main.py` first: the arguments of every command. What a command does stands in a module beside it, which is
imported when the command runs, so that `anybatch --help` imports no JAX. `learn.py` has the arguments of `anybatch learn`.
"""
