"""One S3 server for all tests that need one, started with the first of them."""

from collections.abc import Iterator

import pytest

from tests.integration.faulty_proxy import FaultyProxy
from tests.integration.seaweed import Seaweed, seaweed


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with seaweed(tmp_path_factory.mktemp("seaweed") / "server") as server:
        yield server


@pytest.fixture
def proxy(s3: Seaweed) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3.port) as between:
        yield between
