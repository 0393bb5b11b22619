"""The time for explanations is looked at before every question, not only between mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import count, repeat
from types import SimpleNamespace

import pytest
from planted_ports import CombTransposed

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.cases.case import Case, Request
from conformance.cases.catalogue import catalogue
from conformance.fixtures import Fixtures
from conformance.signatures import failed_case
from conformance.signatures.candidates import candidates
from conformance.signatures.failed_case import FailedCase, OutOfTime
from conformance.signatures.matcher import Matcher
from conformance.tensors import Tensor


class Counting(InProcess):
    asked = 0

    def ask(self, request: Request) -> Mapping[str, Tensor]:
        self.asked += 1
        return super().ask(request)


@cache
def case() -> Case:
    """Sixteen questions."""
    name = "hyper_connections/write-comb-orientation/attention"
    return next(case for case in catalogue(Fixtures.open(verify=False)) if case.id == name)


def clock(monkeypatch: pytest.MonkeyPatch, ticks: Iterator[float]) -> None:
    monkeypatch.setattr(failed_case, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))


def test_the_port_is_not_asked_beyond_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, count(0.0))
    port = Counting(CombTransposed())
    with pytest.raises(OutOfTime):
        FailedCase(case(), port, InProcess(Reference()), end=2.5)
    assert port.asked == 3


def test_a_mistake_is_left_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, repeat(0.0))
    reference = Counting(Reference())
    ready = FailedCase(case(), InProcess(CombTransposed()), reference, end=5.0)
    mistake = next(known for known in candidates() if known.flag == "comb-transposed")
    assert ready.match(mistake) is not None
    clock(monkeypatch, count(4.0))
    reference.asked = 0
    with pytest.raises(OutOfTime):
        ready.match(mistake)
    assert reference.asked == 2


def test_a_case_that_takes_longer_than_there_is_time_is_not_begun() -> None:
    port = Counting(CombTransposed())
    matcher = Matcher(port, 10.0)
    assert matcher.look(case(), took=11.0) == []
    assert matcher.look(case(), took=2.0, most=1.0) == []
    assert port.asked == 0
    assert not matcher.spent
    assert Matcher(port, 0.0).spent
