"""The report of a store for people: a self-contained page and the same in short as Markdown."""

from tasks.report.markdown import markdown_report
from tasks.report.page import report_path, write_report

__all__ = ["markdown_report", "report_path", "write_report"]
