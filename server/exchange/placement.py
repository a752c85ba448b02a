"""Where one request goes: the choice of a replica for each attempt, and what is expected there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.ledger.debug import decision

if TYPE_CHECKING:
    from server.admission import Admission
    from server.ledger.forecast import Forecast
    from server.ledger.ledger import Ledger
    from server.metrics import Series
    from server.replicas import Replica, ReplicaSet
    from server.usage import Usage


class Placement:
    """Of an admitted request. `explains`: the choice is told in a header. `tried`: replicas that had an attempt, in order.

    `unbegun`: the forecast of an attempt whose first token has not been seen; None also where nothing is forecast.
    """

    __slots__ = (
        "_admission",
        "_decision",
        "_explains",
        "_forecast",
        "_ledger",
        "_next_decision",
        "_replicas",
        "tried",
        "unbegun",
    )

    def __init__(self, replicas: ReplicaSet, ledger: Ledger | None, admission: Admission, explains: bool) -> None:
        self._replicas = replicas
        self._ledger = ledger
        self._admission = admission
        self._explains = explains
        self._decision = b""  # why the present attempt is where it is
        self._next_decision = b""  # of a pick that is not sent yet, and may not be
        self._forecast: Forecast | None = None
        self.unbegun: Forecast | None = None
        self.tried: list[Replica] = []

    def pick(self) -> Replica | None:
        """The replica to try next, by what is held now; None if there is none."""
        admission, replicas = self._admission, self._replicas
        if self._ledger is not None:
            self._ledger.look(admission.asked)
            if self._explains:
                self._next_decision = decision(
                    replicas.policy, replicas.fit_for(admission.model, self.tried), admission.asked
                )
        return replicas.pick(admission.model, self.tried, admission.asked)

    def sent(self, replica: Replica) -> None:
        """An attempt there begins."""
        self.tried.append(replica)
        self._decision = self._next_decision
        if self._ledger is not None:
            self._forecast = self.unbegun = self._ledger.sent(self._admission.asked, replica, self._admission.stream)

    def lines(self) -> list[bytes]:
        """Headers of the answer."""
        lines = [self._decision] if self._decision else []
        if self._forecast is not None and self._forecast.known:
            lines.append(b"x-kvgate-routed-tokens: %d\r\n" % self._forecast.routed)
        return lines

    def first_token(self) -> None:
        """It came, so the prompt is computed."""
        if self._ledger is not None and self.unbegun is not None:
            self._ledger.first_token(self.unbegun)
            self.unbegun = None

    def failed(self) -> None:
        """The present attempt came to nothing; another one may follow."""
        if self._ledger is not None and self._forecast is not None:
            self._ledger.failed(self._forecast)
            self._forecast = self.unbegun = None

    def end(self, usage: Usage, series: Series) -> None:
        """The request is over; what the engine said of tokens."""
        if self._ledger is not None and self._forecast is not None:
            self._ledger.end(self._forecast, usage, series)
            self._forecast = self.unbegun = None
