"""The command `anybatch`.

Open `main.py` first: it declares the arguments of every command, and `learn.py` those of `anybatch learn`. Each command
does its work in a module of its own, which is imported when the command runs, so that `anybatch --help` imports no JAX.
"""
