"""Admission: its limits hold, nobody is overtaken, and whoever leaves early gives everything back."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tasks.extraction.admission import Admission, Load

NOTHING = Load(0, 0, 0)
LIMIT = Load(8, 1000, 5000)


def run(test: Callable[[Admission], Coroutine[Any, Any, None]], limit: Load = LIMIT) -> None:
    """Run a test inside an event loop; all that was taken must be given back at its end."""

    async def whole() -> None:
        admission = Admission(limit)
        await test(admission)
        assert admission.used == NOTHING
        assert not admission._waiting

    asyncio.run(whole())


async def settle() -> None:
    """Let every task that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


def enter(admission: Admission, load: Load) -> "asyncio.Task[int]":
    return asyncio.create_task(admission.enter(load))


@pytest.mark.parametrize("seed", range(3))
def test_no_limit_is_ever_exceeded_and_all_rows_get_their_turn(seed: int) -> None:
    chance = random.Random(seed)
    loads = [Load(1, chance.choice([1, 40, 300, 1000]), chance.choice([5, 900, 5000])) for _ in range(2000)]
    entered: list[int] = []

    async def test(admission: Admission) -> None:
        async def row(number: int, load: Load) -> None:
            await admission.enter(load)
            entered.append(number)
            used = admission.used
            assert used.requests <= LIMIT.requests
            assert used.tokens <= LIMIT.tokens
            assert used.bytes <= LIMIT.bytes
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            admission.leave(0, Load(1, load.tokens, 0))  # the server has answered, the dump is still there
            await asyncio.sleep(0)
            admission.leave(0, Load(0, 0, load.bytes))

        await asyncio.gather(*(row(number, load) for number, load in enumerate(loads)))

    run(test)
    assert entered == list(range(2000))  # first come, first served


def test_limits_hold_while_random_rows_are_cancelled() -> None:
    chance = random.Random(7)
    now, most = [0, 0, 0], [0, 0, 0]

    async def test(admission: Admission) -> None:
        async def row(load: Load) -> None:
            parts = (load.requests, load.tokens, load.bytes)
            await admission.enter(load)
            for kind, part in enumerate(parts):
                now[kind] += part
                most[kind] = max(most[kind], now[kind])
            try:
                await asyncio.sleep(0)
            finally:
                for kind, part in enumerate(parts):
                    now[kind] -= part
                admission.leave(0, load)

        tasks = []
        for _ in range(2000):
            tasks.append(asyncio.create_task(row(Load(1, chance.randrange(1, 600), chance.randrange(1, 3000)))))
            if chance.random() < 0.3:
                chance.choice(tasks).cancel()
                await settle()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(test)
    assert most[0] > 1
    assert [used <= limit for used, limit in zip(most, (LIMIT.requests, LIMIT.tokens, LIMIT.bytes))] == [True] * 3


def test_a_long_row_is_not_overtaken_by_short_ones() -> None:
    async def test(admission: Admission) -> None:
        await admission.enter(Load(1, 600, 10))
        long, short = enter(admission, Load(1, 500, 10)), enter(admission, Load(1, 1, 10))
        await settle()
        assert not long.done()
        assert not short.done()  # it would fit, but was second
        admission.leave(0, Load(1, 600, 10))
        await settle()
        assert long.done()
        assert short.done()
        admission.leave(0, Load(2, 501, 20))

    run(test)


def test_a_newcomer_waits_behind_those_who_wait() -> None:
    async def test(admission: Admission) -> None:
        await admission.enter(Load(1, 999, 10))
        waiting = enter(admission, Load(1, 500, 10))
        await settle()
        newcomer = enter(admission, Load(1, 1, 10))
        await settle()
        assert not newcomer.done()
        admission.leave(0, Load(1, 999, 10))
        await asyncio.gather(waiting, newcomer)
        admission.leave(0, Load(2, 501, 20))

    run(test)


@pytest.mark.parametrize("large", [Load(1, 1001, 10), Load(1, 10, 5001), Load(9, 10, 10)])
def test_a_row_larger_than_the_limit_runs_alone(large: Load) -> None:
    async def test(admission: Admission) -> None:
        await admission.enter(Load(1, 1, 1))
        waiting = enter(admission, large)
        await settle()
        assert not waiting.done()
        admission.leave(0, Load(1, 1, 1))
        await waiting
        assert admission.used == large
        behind = enter(admission, Load(1, 1, 1))
        await settle()
        assert not behind.done()
        admission.leave(0, large)
        await behind
        admission.leave(0, Load(1, 1, 1))

    run(test)


@pytest.mark.parametrize("kind", ["requests", "tokens", "bytes"])
def test_each_limit_counts_by_itself(kind: str) -> None:
    whole = Load(**{name: getattr(LIMIT, name) if name == kind else 1 for name in ("requests", "tokens", "bytes")})
    one = Load(**{name: int(name == kind) for name in ("requests", "tokens", "bytes")})

    async def test(admission: Admission) -> None:
        await admission.enter(whole)  # exactly the limit fits
        waiting = enter(admission, one)
        await settle()
        assert not waiting.done()
        admission.leave(0, one)
        await settle()
        assert waiting.done()
        admission.leave(0, whole)

    run(test)


def test_a_row_cancelled_while_it_waits_takes_nothing_and_lets_the_next_one_in() -> None:
    async def test(admission: Admission) -> None:
        await admission.enter(Load(1, 600, 10))
        first, second = enter(admission, Load(1, 500, 10)), enter(admission, Load(1, 300, 10))
        await settle()
        first.cancel()
        await settle()
        assert first.cancelled()
        assert second.done()
        assert admission.used == Load(2, 900, 20)
        admission.leave(0, Load(2, 900, 20))

    run(test)


def test_a_row_cancelled_right_after_it_was_admitted_gives_everything_back() -> None:
    async def test(admission: Admission) -> None:
        await admission.enter(Load(1, 600, 10))
        first, second = enter(admission, Load(1, 900, 10)), enter(admission, Load(1, 200, 10))
        await settle()
        admission.leave(0, Load(1, 600, 10))  # admits the first, whose task has not woken yet
        first.cancel()
        await settle()
        assert first.cancelled()
        assert second.done()
        assert admission.used == Load(1, 200, 10)
        admission.leave(0, Load(1, 200, 10))

    run(test)


def test_a_row_cancelled_just_before_it_would_be_admitted_takes_nothing() -> None:
    async def test(admission: Admission) -> None:
        await admission.enter(Load(1, 600, 10))
        first, second = enter(admission, Load(1, 900, 10)), enter(admission, Load(1, 200, 10))
        await settle()
        first.cancel()  # its task has not woken yet
        admission.leave(0, Load(1, 600, 10))
        (outcome,) = await asyncio.gather(first, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError)
        assert second.done()
        assert admission.used == Load(1, 200, 10)
        admission.leave(0, Load(1, 200, 10))

    run(test)


def test_who_wants_to_be_alone_goes_first_when_the_others_have_left_and_keeps_them_out() -> None:
    async def scenario() -> None:
        admission = Admission(Load(4, 100, 100))
        one = Load(1, 10, 10)
        await admission.enter(one)
        await admission.enter(one)
        alone = asyncio.create_task(admission.enter(one, alone=True))
        next_one = asyncio.create_task(admission.enter(one))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not next_one.done(), "nobody passes one who waits to be alone"
        admission.leave(0, one)
        await asyncio.sleep(0)
        assert not alone.done()
        admission.leave(0, Load(1, 10, 0))  # its dump is still in staging
        await asyncio.wait_for(alone, 1)
        await asyncio.sleep(0)
        assert not next_one.done()
        admission.leave(0, one)
        await asyncio.wait_for(next_one, 1)

    asyncio.run(scenario())


def test_rows_go_to_the_server_that_has_least_to_do_and_is_there() -> None:
    async def scenario() -> None:
        admission = Admission(Load(2, 100, 1000), servers=2)
        assert await admission.enter(Load(1, 60, 10)) == 0
        assert await admission.enter(Load(1, 30, 10)) == 1
        assert await admission.enter(Load(1, 50, 10)) == 1
        waiting = enter(admission, Load(1, 50, 10))
        await settle()
        assert not waiting.done(), "one has no room for the tokens, the other none for a request"
        admission.close(0)
        admission.leave(0, Load(1, 60, 10))
        await settle()
        assert not waiting.done(), "the one with room is lost"
        admission.reopen(0)
        assert await waiting == 0

    asyncio.run(scenario())


def test_staging_is_shared_by_all_servers() -> None:
    async def scenario() -> None:
        admission = Admission(Load(8, 100, 100), servers=2)
        assert await admission.enter(Load(1, 10, 70)) == 0
        waiting = enter(admission, Load(1, 10, 40))
        await settle()
        assert not waiting.done()
        admission.leave(0, Load(1, 10, 0))
        await settle()
        assert not waiting.done(), "the dump is still there"
        admission.leave(0, Load(0, 0, 70))
        await waiting

    asyncio.run(scenario())


def test_the_time_is_accounted_for_from_the_first_row_to_the_last() -> None:
    now = 100.0

    async def scenario() -> None:
        nonlocal now
        admission = Admission(Load(1, 100, 100), clock=lambda: now)
        now += 5  # nothing is there yet
        await admission.enter(Load(1, 10, 60))
        now += 1  # room for no more, and nobody waits
        second = enter(admission, Load(1, 20, 60))
        await settle()
        now += 2  # one waits for the server
        admission.leave(0, Load(1, 10, 0))
        await settle()
        now += 4  # one waits for staging
        admission.leave(0, Load(0, 0, 60))
        await second
        now += 8
        admission.close(0)
        now += 16
        admission.reopen(0)
        third = enter(admission, Load(1, 20, 30))
        admission.leave(0, Load(1, 20, 60))
        await third
        now += 32  # after the last row
        admission.leave(0, Load(1, 20, 30))
        usage = admission.usage
        assert (usage.starved, usage.full, usage.blocked, usage.lost) == (9, 2, 4, 16)
        assert usage.requests == 3 + 24
        assert usage.tokens == 30 + 24 * 20
        shares = usage.shares()
        assert shares["full"] == 2 / 31
        assert shares["tokens"] == pytest.approx((30 + 480) / 31)

    asyncio.run(scenario())


def test_time_in_which_batches_wait_for_room_in_the_output_is_not_called_room_for_more() -> None:
    now = 0.0

    async def scenario() -> None:
        nonlocal now
        admission = Admission(Load(2, 100, 100), clock=lambda: now)
        await admission.enter(Load(1, 10, 10))
        now += 1  # nobody waits
        admission.hold(1)
        now += 2  # a batch has no room for its shard
        admission.hold(1)
        now += 4
        admission.hold(-2)
        now += 8
        await admission.enter(Load(1, 10, 10))
        assert (admission.usage.starved, admission.usage.blocked) == (9, 6)

    asyncio.run(scenario())
