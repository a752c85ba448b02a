"""Predictions against deliveries, and what is made of the difference."""

import pytest

from server.ledger.prediction import FAITH_SHARE, MISSING, SHARE, UNCERTAIN, Prediction


def test_right_predictions_leave_full_trust() -> None:
    prediction = Prediction()
    for tokens in (0, 16, 320):
        prediction.judge(tokens, tokens)
    assert (prediction.error, prediction.faith, prediction.missing) == (0.0, 1.0, False)
    assert (prediction.judged, prediction.exact) == (3, 3)


def test_trust_follows_what_is_delivered_down_and_up_again() -> None:
    prediction = Prediction()
    prediction.judge(100, 50)
    assert prediction.trust == pytest.approx(1 - FAITH_SHARE / 2)
    for _ in range(200):
        prediction.judge(100, 50)
    assert prediction.trust == pytest.approx(0.5, abs=1e-6)
    for _ in range(200):
        prediction.judge(100, 130)  # more than was predicted is no more than all
    assert prediction.trust == pytest.approx(1.0, abs=1e-6)


def test_the_error_is_a_running_mean_with_its_sign() -> None:
    prediction = Prediction()
    assert prediction.error is None
    prediction.judge(100, 40)
    assert prediction.error == 60.0
    prediction.judge(0, 20)
    assert prediction.error == pytest.approx(60.0 + SHARE * (-20 - 60))


def test_hits_that_are_expected_and_never_come_raise_the_alarm_until_one_comes() -> None:
    prediction = Prediction()
    for _ in range(MISSING):
        assert not prediction.missing
        prediction.judge(64, 0)
    assert prediction.missing
    prediction.judge(0, 0)  # none was expected: neither good nor bad
    assert prediction.missing
    prediction.judge(64, 16)
    assert not prediction.missing


def test_a_match_is_trusted_less_while_events_are_missing() -> None:
    prediction = Prediction()
    prediction.uncertain = True
    assert prediction.faith == UNCERTAIN
