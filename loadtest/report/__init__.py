"""The report: one HTML page that needs nothing but itself, with the verdict first."""

from loadtest.report.page import render

__all__ = ["render"]
