"""Where one request goes: the choice of a replica for each attempt, and what is expected there.

The ledger only makes a choice better: a fault in it is told, and the request goes on as if nothing were known of it.
"""

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
        ledger = self._ledger
        if ledger is not None:
            try:
                ledger.look(admission.asked)
                if self._explains:
                    fit = replicas.fit_for(admission.model, self.tried)
                    self._next_decision = decision(replicas.policy, fit, admission.asked)
            except Exception:  # noqa: BLE001 - told by `note`
                ledger.faults.note("looking a prompt up")
        return replicas.pick(admission.model, self.tried, admission.asked)

    def sent(self, replica: Replica) -> None:
        """An attempt there begins."""
        self.tried.append(replica)
        self._decision = self._next_decision
        ledger, admission = self._ledger, self._admission
        if ledger is not None:
            try:
                self._forecast = self.unbegun = ledger.sent(admission.asked, replica, admission.stream)
            except Exception:  # noqa: BLE001 - told by `note`
                ledger.faults.note("predicting what is delivered")

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
        self._let_go(None)

    def end(self, usage: Usage, series: Series) -> None:
        """The request is over; what the engine said of tokens."""
        self._let_go((usage, series))

    def _let_go(self, outcome: tuple[Usage, Series] | None) -> None:
        ledger, forecast = self._ledger, self._forecast
        if ledger is None or forecast is None:
            return
        self._forecast = self.unbegun = None
        try:
            if outcome is None:
                ledger.failed(forecast)
            else:
                ledger.end(forecast, *outcome)
        except Exception:  # noqa: BLE001 - told by `note`
            ledger.faults.note("comparing what was delivered")
