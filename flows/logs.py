"""Brings the core's warnings onto the flow run's page: a lost server, a restart, a lock that was taken over."""

import contextlib
import logging
from collections.abc import Iterator

from prefect.logging import get_run_logger

CORE = "tasks"  # the core's loggers, which know nothing of Prefect
FROM_CORE = "drillcore_core"  # a mark on such a line, which the terminal shows by itself


class _Forward(logging.Handler):
    """To the run's logger, from whatever thread: Prefect's own handler drops lines of threads without its context."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.target = get_run_logger()

    def emit(self, record: logging.LogRecord) -> None:
        self.target.log(record.levelno, "%s", record.getMessage(), extra={FROM_CORE: True})


@contextlib.contextmanager
def warnings_on_the_page() -> Iterator[None]:
    """For the time of the context; inside a flow."""
    handler, core = _Forward(), logging.getLogger(CORE)
    core.addHandler(handler)
    try:
        yield
    finally:
        core.removeHandler(handler)
