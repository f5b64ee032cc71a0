"""The machine's clock is set by hours in mid-run, forward and back.

The named fake: a shared library, preloaded into the flow's process, that adds an offset to what the C library says of
the wall clock. The machine's own clock is not ours to set, and the server's process has none of the pipeline's clocks.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.store.layout import Store
from tests.faults.drill import Site, wait_for_commits

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

HOUR = 3600
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("DRILL_CLOCK"), O_RDONLY);
    offset = mmap(0, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    real = dlsym(RTLD_NEXT, "clock_gettime");
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = real(clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    int result = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return result;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""


class Clock:
    """The offset, in seconds, of the wall clock of processes that are started with `environment`."""

    def __init__(self, folder: Path):
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler is here")
        library, source, self.offset = folder / "clock.so", folder / "clock.c", folder / "offset"
        source.write_text(SOURCE)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        self.offset.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "DRILL_CLOCK": str(self.offset)}

    def set(self, hours: int) -> None:
        with self.offset.open("r+b", buffering=0) as file:  # in place: it is mapped
            file.write((hours * HOUR).to_bytes(8, "little", signed=True))


def test_the_fake_moves_the_clock(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    clock.set(-7)
    code = "import datetime, time; print(time.time(), datetime.datetime.now().timestamp(), time.monotonic())"
    said = {
        name: [float(value) for value in subprocess.check_output([sys.executable, "-c", code], env=environment).split()]
        for name, environment in {"moved": clock.environment, "real": {}}.items()
    }
    shifts = [round((moved - real) / HOUR) for moved, real in zip(said["moved"], said["real"], strict=True)]
    assert shifts == [-7, -7, 0]


@pytest.mark.slow
def test_a_clock_that_jumps_by_hours_disturbs_nothing(site: Site, tmp_path: Path) -> None:
    config, store, clock = site.write_config(tmp_path / "output"), Store(tmp_path / "output"), Clock(tmp_path)
    run = site.flows("extract", config, **clock.environment)
    wait_for_commits(run, store, 2)
    clock.set(+5)
    wait_for_commits(run, store, 12)
    clock.set(-5)
    assert not store.manifest.exists(), "the run went on too fast for this drill"
    assert run.wait() == 0, run.err
    print(f"{run.seconds:.1f} s\n{run.err}")
    site.assert_complete(store)
    assert "retries" not in run.err or ", 0 retries, 0 restarts, 0 failed" in run.err
