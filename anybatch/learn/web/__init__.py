"""`anybatch learn --web`: the exercises, and a playground for losses, as a local web site.

`server` starts it, `access` says who may use it, and `workspace` is what all browser tabs share: the learner's files
and the checks. The pages are `list_page`, `exercise_page` (with `results`) and `playground`. It is built on NiceGUI.
"""
