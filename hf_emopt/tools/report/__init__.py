"""``hf-emopt report``: one page of plots from the log of a run."""

from hf_emopt.tools.report.page import build_page, write_report
from hf_emopt.tools.report.run_log import RunLog, RunLogError, read_log

__all__ = ["RunLog", "RunLogError", "build_page", "read_log", "write_report"]
