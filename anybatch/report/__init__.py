"""`Report`: a training run as one self-contained HTML page.

Open `page.py` first: it gathers what the template `page.html.jinja` shows. `tables.py` makes the key figures and the
tables, `figures.py` the plots, and `svg.py` draws them.
"""

from anybatch.report.page import Report

__all__ = ["Report"]
