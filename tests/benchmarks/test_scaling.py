"""The page of scaling says what its rounds say."""

import pytest

from benchmarks import scaling

MB = 1_000_000


def measured(seconds: float, share: float) -> dict[str, float]:
    state = {"parameters": 10 * MB, "gradients": 10 * MB, "optimizer": 20 * MB}
    return {"seconds": seconds, "rows": 100, **{kind: int(size * share) for kind, size in state.items()}}


@pytest.fixture
def rounds() -> scaling.Rounds:
    return {
        "ddp 1": [measured(seconds, 1) for seconds in (10.0, 9.0, 20.0)],
        "ddp 2": [measured(seconds, 1) for seconds in (5.0, 6.25, 12.5)],
        "zero3 512": [measured(4.0, 0.5)],
    }


def rows_of(page: str) -> list[list[str]]:
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_speed_and_efficiency_are_against_one_process_by_medians(
    rounds: scaling.Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "usable_cores", lambda: [0, 1])

    alone, both, shared = rows_of(scaling.page({}, rounds))

    assert alone[:6] == ["ddp", "1", "10.0", "5.0 to 11.1", "1.00", "100%"]
    assert both[:6] == ["ddp", "2", "16.0", "8.0 to 20.0", "1.60", "80%"]
    assert shared[4:6] == ["2.50", "cores shared"]


def test_bytes_are_a_ranks_beside_those_of_ddp(rounds: scaling.Rounds) -> None:
    *_, shared = rows_of(scaling.page({}, rounds))

    assert shared[6:] == ["5.0", "5.0", "10.0", "20.0", "50%"]
