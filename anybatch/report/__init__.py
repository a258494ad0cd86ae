"""A training run as one page of HTML: `Report`."""

from anybatch.report.page import Report

__all__ = ["Report"]
