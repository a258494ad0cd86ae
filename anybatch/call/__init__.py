"""What every call shares: its options, arguments, traced loss, microbatches, memory figures and compiled programs.

Open `options.py` first (what a user may ask for), then `arguments.py` (which argument is differentiated, which is the
batch) and `loss.py` (the user's function, traced). A new option of `value_and_grad` begins in `options.py`.
"""
