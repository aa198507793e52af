"""A process that is killed costs nothing that was complete, and its command can be repeated.

More than 200 kills in the test run, ten times as many with ``--full``; and a disk that is full from any call on.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from memstore import assets
from tests.faults.killing import Trial
from tests.faults.operations import KILLS, OPERATIONS
from tests.faults.server import Server


@pytest.fixture
def trial(server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> Trial:
    return Trial(server, OPERATIONS[request.param], tmp_path)


@pytest.mark.parametrize("trial", OPERATIONS, indirect=True)
def test_a_command_that_is_killed_again_and_again_is_finished_by_the_next_one(trial: Trial, times: int) -> None:
    """It is killed up to four times before it may finish: first in a run of its own, at one call after the other, then
    in those that resume what the killed ones left."""
    chance = random.Random(trial.operation.command)
    kills = chains = 0
    calls = chance.sample(range(1, trial.calls + 1), trial.calls)
    while kills < KILLS * times:
        assert chains <= KILLS * times, "a chain without a kill"
        first = calls[chains % len(calls)]
        faults = [{"strike": strike, "torn": chance.random() < 0.5} for strike in [first, *chance.choices(calls, k=2)]]
        faults.append({"seconds": trial.seconds * chance.uniform(0.1, 0.9)})
        kills += trial.kill(*faults)
        chains += 1


@pytest.mark.parametrize("trial", OPERATIONS, indirect=True)
def test_a_disk_that_is_full_from_any_call_on_costs_nothing(trial: Trial, times: int) -> None:
    chance = random.Random(trial.operation.command)
    calls = range(1, trial.calls + 1)
    noticed = sum(trial.fill(strike) for strike in sorted({2, *chance.sample(calls, min(len(calls), 4 * times))}))
    assert noticed


@pytest.mark.real
def test_a_real_model_is_killed_and_its_command_finished(tmp_path: Path, times: int) -> None:
    """At any instant, most often in the middle of a forward pass, and at calls that change files."""
    (tmp_path / "server").mkdir()
    server = Server(tmp_path / "server", "real")
    jonah, ruth = (assets.book_text(book)[0] for book in ("Jonah", "Ruth"))
    documents = {
        "one": {"esther": ruth[:1200], "ruth": ruth[1200:1500]},
        "two": {"jonah": jonah[:2000], "joel": jonah[:300]},
    }
    try:
        trial = Trial(server, OPERATIONS["index"], tmp_path / "trial", documents)
        chance, kills = random.Random(0), 0
        while kills < 10 * times:
            strike = {"strike": chance.randint(1, trial.calls), "torn": chance.random() < 0.5}
            kills += trial.kill({"seconds": trial.seconds * chance.random()}, strike, {"seconds": trial.seconds / 4})
    finally:
        server.close()
