"""What stands in for recordings where a deviation is declared: the reference that deviates too, asked along."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property

from conformance.adapters.session import Answer, Session
from conformance.cases.case import Call, Handle, Open, Request
from conformance.deviations import DEVIATIONS, touching
from conformance.judge.expectations import Expectation
from conformance.judge.rerecorded import rerecorded
from conformance.tensors import Tensor


@cache
def _deviating_reference(names: tuple[str, ...]) -> Session:
    """One for a whole run: it keeps converted weights from case to case."""
    # Imported late: a port without deviations needs no second implementation beside it.
    from conformance.faults.deviations import DeviatingReference

    return DeviatingReference(names)


class Reply:
    """The stand-in's reply to one request; without deviations there is none, and rules stay as they are."""

    def __init__(self, session: Session | None, request: Request) -> None:
        self._session, self._request = session, request
        if not isinstance(request, Call):
            # Objects have a state: they must hear every request, judged or not.
            _ = self.results

    @cached_property
    def results(self) -> Mapping[str, Tensor]:
        """Results by name; of a stateless method only when somebody looks at them."""
        if self._session is None:
            return {}
        try:
            return self._session.ask(self._request)
        except Answer as answer:
            raise RuntimeError(f"the reference with the declared deviations: {answer}") from answer

    def in_place_of_recordings(self, rule: Expectation) -> Expectation:
        """The rule, with the reply in place of what was recorded."""
        return rule if self._session is None else rerecorded(rule, self.results)


class StandIn:
    """The deviating reference in one case's conversation."""

    def __init__(self, names: tuple[str, ...]) -> None:
        """`names`: the declared deviations."""
        self._names = names
        self._opened: dict[str, str] = {}
        self._touched: set[str] = set()
        self._heard: set[str] = set()
        if names:
            _deviating_reference(names).reset()

    def reply(self, request: Request) -> Reply:
        """Let the stand-in hear a request that the port has answered."""
        if isinstance(request, Open):
            self._opened[request.name] = request.method
        method = request.method if isinstance(request, Open | Call) else self._opened[request.name]
        names = touching(self._names, method)
        self._touched |= set(names)
        heard = bool(names) or (bool(self._names) and method == "runtime") or self._about_something_heard(request)
        if heard and isinstance(request, Open):
            self._heard.add(request.name)
        return Reply(_deviating_reference(self._names) if heard else None, request)

    def _about_something_heard(self, request: Request) -> bool:
        """Whether it rolls back, saves or restores an object that the stand-in has too."""
        target = request.arguments.get("target") if isinstance(request, Open | Call) else None
        return isinstance(target, Handle) and target.name in self._heard

    @property
    def touched(self) -> tuple[str, ...]:
        """The declared deviations that anything in the case depends on, in the order of the list."""
        return tuple(name for name in DEVIATIONS if name in self._touched)
