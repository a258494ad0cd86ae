"""What every call shares: options, arguments, models, the traced loss, microbatches, memory and compiled programs.

Open `options.py` first: it lists everything a user can ask for, and a new option begins there. Then read `arguments.py`
(which argument is differentiated, and which is the batch) and `loss.py` (the user's function, traced).
"""
