"""A training run as one self-contained page of HTML: `Report`.

Open `page.py` first; `figures.py` draws, `tables.py` tabulates, and `page.html.jinja` is the template.
"""

from anybatch.report.page import Report

__all__ = ["Report"]
