"""The commands of `anybatch learn`, and what they show in the terminal.

Open `learner_commands` first; `author_commands` has `dev check` and `dev new`. `watch` is the interactive session, and
`pages` draws everything that is shown.
"""
