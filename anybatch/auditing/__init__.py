"""`ab.audit`: compares a user's own accumulation loop or training step with the gradient of the full batch.

Open `audit.py` first: it has the function and the table that it returns. `candidates.py` calls the loop or step with
copies of its arguments and finds out what it returned. `causes.py` computes what known mistakes would give.
"""
