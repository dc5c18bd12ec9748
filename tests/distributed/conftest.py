"""The worker pool, shared by all distributed tests of a session."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool(8)
    yield workers
    workers.close()
