"""The command `anybatch`.

Open `main.py` first: it declares the arguments of every command, and `learn.py` those of `anybatch learn`. The others
do the work of the commands. They are imported when a command runs, so that `anybatch --help` imports no JAX.
"""
