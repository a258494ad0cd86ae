"""The job behind `anybatch demo` and `anybatch train`: a small GPT that learns to write like a text."""
