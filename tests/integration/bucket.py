"""A bucket to try things on: SeaweedFS on this machine and, before it, a proxy that spoils some of the requests.

    python -m tests.integration.bucket FOLDER [--whole]

Prints how it is reached; ends with Ctrl-C, and takes the bucket with it. A tenth of the requests and a quarter of the
parts are spoiled: throttled, failed, cut off, damaged, or done with the answer lost. --whole: none.
"""

import argparse
import signal
from dataclasses import dataclass
from pathlib import Path

from tests.integration.faulty_proxy import Fault, FaultyProxy, Request
from tests.integration.seaweed import BUCKET, KEY, SECRET, seaweed

PART = "partNumber="
FOREVER = 1 << 60


@dataclass
class Sometimes(Fault):
    """One request in `every` of those that match."""

    count: int = FOREVER
    every: int = 10
    asked: int = 0

    def matches(self, request: Request) -> bool:
        if not super().matches(request):
            return False
        self.asked += 1
        return self.asked % self.every == 0


def some_faults() -> list[Fault]:
    """Some of each kind."""
    return [
        Sometimes("drop", "PUT", PART, after=1 << 20, every=11),
        Sometimes("corrupt", "PUT", PART, every=13),
        Sometimes("lose", "PUT|POST", PART + "|uploadId", every=17),
        Sometimes("cut", "GET", after=300, every=19),
        Sometimes("answer", status=500, code="InternalError", every=23),
        Sometimes("answer", every=29),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new one, for the server's files")
    parser.add_argument("--whole", action="store_true", help="spoil nothing")
    options = parser.parse_args()
    with seaweed(options.folder) as server, FaultyProxy(server.port) as proxy:
        proxy.faults[:] = [] if options.whole else some_faults()
        print(f"export AWS_ACCESS_KEY_ID={KEY} AWS_SECRET_ACCESS_KEY={SECRET} AWS_ENDPOINT_URL_S3={proxy.url}")
        print(f"# a bucket is there: s3://{BUCKET}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
        spoiled = sum(fault.met for fault in proxy.faults)
        print(f"# {len(proxy.requests)} requests, of which {spoiled} were spoiled")


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # also in the threads: sigwait takes them
    main()
