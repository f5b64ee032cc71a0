"""The report of a store for people: a self-contained page and the same in short as Markdown."""

from tasks.report.markdown import markdown_report, markdown_table
from tasks.report.page import report_path, write_report

__all__ = ["markdown_report", "markdown_table", "report_path", "write_report"]
