"""`Report`: a training run as one self-contained HTML page.

Open `page.py` first: it gathers what the template `page.html.jinja` shows, and makes its tables. `figures.py`
makes the plots.
"""

from anybatch.report.page import Report

__all__ = ["Report"]
