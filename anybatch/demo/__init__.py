"""The GPT that `anybatch demo` and `anybatch train` train on a text.

Open `job.py` first: one training run, from its options to its report. `config.py` declares the options, `text.py` makes
batches of the text, and `gpt.py` is the model.
"""
