"""What runs in the process of `tasks.lineage.early.Preparation`: a line of JSON in, what it came to out.

It ends when its input does: with the flow, whatever ends that. A record may be killed at any moment.
"""

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.config import LineageConfig
from tasks.errors import LineageError
from tasks.store.layout import Store


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the flow's to handle
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what MLflow prints is no reply
    asked: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(asked,), daemon=True).start()

    from tasks.lineage.record import prepare, record_extraction

    first = asked.get()
    arguments = LineageConfig(**first["config"]), first["default_uri"], Path(first["artifacts"])
    replies.write(_outcome(lambda: prepare(*arguments)))
    replies.write(_outcome(lambda: record_extraction(Store(Path(asked.get()["store"])), *arguments)))


def _read(asked: "queue.SimpleQueue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        asked.put(json.loads(line))
    os._exit(0)


def _outcome(work: Callable[[], str | None]) -> str:
    """A line with what the work returned, or with its error."""
    try:
        outcome = {"value": work()}
    except LineageError as error:
        outcome = {"error": str(error)}
    except Exception as error:
        outcome = {"error": f"{type(error).__name__}: {error}"}
    return json.dumps(outcome) + "\n"


if __name__ == "__main__":
    main()
