"""What every replica holds, what of a prompt that is, and whether it was so.

A request is `ask`ed about when it is admitted, `look`ed up when it is its turn, `sent` to a replica, and its forecast ends
exactly once, in `end`. All of it runs in the event loop; prompts are tokenised in a thread of their own, afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from time import monotonic
from typing import Any

from kvcache.expected import Expected, Ticket
from kvcache.index import PrefixIndex
from kvcache.inferred import Inferred
from kvcache.match import NOTHING, Match, usable
from kvgate.settings import Settings
from server.ledger.asking import Asking
from server.ledger.counting import with_twins, without
from server.ledger.faults import Faults
from server.ledger.feeds import EventFeeds
from server.ledger.forecast import Forecast
from server.ledger.shelf import Shelf, Speller, parse_folders
from server.ledger.sources import EventSources
from server.ledger.tokeniser import Tokeniser
from server.ledger.trials import Trials
from server.ledger.untokenised import Entry, Untokenised
from server.metrics import GatewayMetrics, Series
from server.replica import Replica
from server.routing.asked import Asked
from server.routing.cost import RATE
from server.usage import Usage

logger = logging.getLogger("kvgate")

ANNOUNCED = 2.0  # s that events may take after a request ended; then what they did not confirm is expected no more
SOON = 0.25  # s that they take mostly; so long something is expected of a prompt that is not even tokenised by then
LONGEST = 900.0  # s after which nothing is expected of a request any more
SLACK = 1.5  # times the time that a prompt should take, until it counts as computed unseen
TICK = 0.5  # s between two roundups
SLICE = 128  # blocks told to the index at once
TIDY = 2048  # blocks of dropped replicas put away in each


class Ledger:
    """One for a gateway, for all its models. `start` and `stop` are called by upkeep."""

    def __init__(self, settings: Settings, metrics: GatewayMetrics, engine_headers: Mapping[str, str]) -> None:
        """`engine_headers` go with the gateway's own requests to engines."""
        self.index = PrefixIndex()
        self.faults = Faults()
        self._expected = Expected(self.index)
        self._inferred = Inferred(self._expected)
        self._shelf = Shelf(parse_folders(settings.tokenizer), self._opened)
        self._tokeniser = Tokeniser(self.faults)
        self._asking = Asking(self._shelf, self._tokeniser, self.faults)
        self._trials = Trials(
            self._speller_of,
            lambda replica: self._shelf.why_not(replica.models),
            self._probed,
            self._recovered,
            self._shelf.distrust,
            engine_headers,
            self.faults,
        )
        self._untokenised = Untokenised()
        self._spelling: set[asyncio.Task[None]] = set()
        self._metrics = metrics
        self._sources = EventSources.parse(settings.kv_events)
        self._feeds: EventFeeds | None = None
        self._replicas: set[Replica] = set()
        self._away: frozenset[str] = (
            frozenset()
        )  # entries of the index whose replicas are down: nobody can have what they hold
        self._barren: frozenset[str] = frozenset()  # those that deliver nothing: nobody is to count on what they hold
        self._miscounts = 0
        self._ticking: asyncio.Task[None] | None = None

    # -- life

    async def start(self) -> None:
        self._feeds = EventFeeds(
            self.index, self._speller_of, self._changed, self._sources, self._metrics, on_restart=self.restarted
        )
        self._ticking = asyncio.create_task(self._tick())

    async def stop(self) -> None:
        running = [*self._spelling, *(() if self._ticking is None else (self._ticking,))]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._trials.stop()
        if self._feeds is not None:
            await self._feeds.stop()
        await self._shelf.stop()
        self._tokeniser.stop()

    # -- replicas come and go

    def drop(self, replica: Replica) -> None:
        """It is gone for good, and so is what it held."""
        if replica not in self._replicas:
            return
        self._replicas.discard(replica)
        self._trials.drop(replica)
        if self._feeds is not None:
            self._feeds.drop(replica)
        self._inferred.drop(replica.name, monotonic())
        self._weigh()

    def learn(self, replica: Replica) -> None:
        """It answered, and said which models it serves. Not yet `up`: it is new, or came back."""
        if replica not in self._replicas:
            self._replicas.add(replica)
            self._trials.add(replica)
            if self._feeds is not None:
                self._feeds.add(replica)
        elif not replica.up:
            self._trials.anew(replica)
            self._forget_inferred(replica)
        self._shelf.learn(replica.models)
        if self._feeds is not None:
            self._feeds.wake(replica)

    def restarted(self, replica: Replica) -> None:
        """Another process answers in its place, with an empty cache; its health checks may never have noticed."""
        if replica in self._replicas:
            logger.info("%s restarted", replica.name)
            self._trials.anew(replica)
            self._forget_inferred(replica)
            replica.prediction.forgive()
            self._weigh()

    def _forget_inferred(self, replica: Replica) -> None:
        if self._inferred.knows(replica.name):
            self.index.clear(replica.name, monotonic())

    def _speller_of(self, replica: Replica) -> Speller | None:
        return self._shelf.speller(replica.models)

    def _opened(self) -> None:
        assert self._feeds is not None
        for replica in self._replicas:
            self._feeds.wake(replica)

    def _changed(self, replica: Replica) -> None:
        """A batch of its events was applied, or whether it has any changed."""
        assert self._feeds is not None
        if replica not in self._replicas:
            return
        names = self._feeds.names(replica)
        if names:
            self._inferred.release(replica.name)
        self._trials.follows(replica, bool(names))
        replica.prediction.uncertain = any(self.index.uncertain(name) for name in names)
        replica.faith = replica.prediction.faith

    def _recovered(self, replica: Replica) -> None:
        """Its self-test passed, so its hits may be counted on again."""
        replica.prediction.forgive()
        self._weigh()

    def _weigh(self) -> None:
        """Whose blocks are not to be counted on."""
        self._away = frozenset(n for r in self._replicas if not r.up for n in self._entries(r))
        self._barren = frozenset(n for r in self._replicas if r.prediction.missing for n in self._entries(r))
        for replica in self._replicas:
            replica.faith = replica.prediction.faith

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            try:
                self._round_up(monotonic())
            except Exception:  # noqa: BLE001 - told by `note`
                self.faults.note("looking after the index")

    def _round_up(self, now: float) -> None:
        self._expected.age(now)
        self._inferred.age(now)
        self.index.tidy(TIDY, now)
        self._trials.look_after(now)
        self._weigh()

    async def _probed(self, replica: Replica, speller: Speller, fields: dict[str, Any]) -> Match:
        """What this replica holds of a completion."""
        asked = self.ask("/v1/completions", speller.name, fields, fields["cache_salt"])
        if asked.unspelled:
            await self.spell(asked)
        if asked.prompt is None:
            return NOTHING
        match = self.index.match(asked.prompt, asked.namespace)
        return without(match, match.tokens.keys() - set(self._entries(replica)))

    # -- a request

    def ask(self, route: str, model: str, fields: Mapping[str, Any], salt: str | None, size: int = 0) -> Asked:
        """What can be known of a request whose body of `size` bytes says `fields`, for the served `model`; `salt` is what the
        engine gets. Never raises."""
        return self._asking.ask(route, model, fields, salt, size)

    async def spell(self, asked: Asked) -> None:
        """Makes known the prompt of an `unspelled` request; without a word where that fails."""
        await self._asking.spell(asked)

    def look(self, asked: Asked) -> None:
        """What every replica holds of it now."""
        if asked.prompt is None:
            return
        match = self.index.match(asked.prompt, asked.namespace)
        asked.twins = self._untokenised.shared(asked.namespace, asked.prompt)
        if asked.twins:
            match = with_twins(match, asked, self.index)
        if self._away:
            match = without(match, self._away)
        asked.held = asked.match = match
        if self._barren:
            asked.match = without(match, self._barren)

    def sent(self, asked: Asked, replica: Replica, stream: bool) -> Forecast:
        """It goes to this replica. Nothing is left behind where this raises."""
        now = monotonic()
        routed = in_flight = 0
        names = self._names(replica)
        for name in names:
            held = asked.held.tokens.get(name, 0)
            if held > routed:
                routed = held
                in_flight = held if name in asked.twins else self.index.in_flight(asked.held, name)
        miss = max(0, asked.tokens - int(routed * replica.faith))
        rate = replica.prefill.tokens_per_second or RATE
        due = now + (LONGEST if stream else SLACK * (replica.work.queued + miss) / rate)
        job = replica.work.begin(miss, miss + asked.output, due)
        known = asked.prompt is not None and bool(names)
        forecast = Forecast(asked, replica, asked.held.available, routed, in_flight, known, now, job)
        if known:
            try:
                self._expect(forecast, names)
            except BaseException:
                self.failed(forecast)
                raise
        return forecast

    def _entries(self, replica: Replica) -> tuple[str, ...]:
        """Its entries in the index, as far as there are any."""
        names = self._feeds.names(replica) if self._feeds is not None else ()
        return names or ((replica.name,) if self._inferred.knows(replica.name) else ())

    def _names(self, replica: Replica) -> tuple[str, ...]:
        """Its entries in the index; one is made for an engine without events."""
        names = self._entries(replica)
        if names or replica.kv_blocks is None or replica not in self._replicas:
            return names
        self._inferred.add(replica.name, replica.kv_blocks)
        return (replica.name,)

    def _expect(self, forecast: Forecast, names: tuple[str, ...]) -> None:
        """The blocks that this request will leave behind, once they are known."""
        asked, replica = forecast.asked, forecast.replica
        if len(names) != 1 or asked.speller is None or asked.rendered is None or asked.rendered.media:
            return  # of several ranks nobody knows which one gets it; the size of an image is not known
        name = names[0]
        size = self.index.replicas[name].block_size or replica.block_size
        if not size:
            return
        forecast.ticket = ticket = self._expected.begin(name, size, forecast.sent_at + LONGEST, asked.namespace)
        assert asked.prompt is not None
        forecast.entry = entry = self._untokenised.add(asked.namespace, asked.prompt, name)  # now: its twin may be next
        task = asyncio.get_running_loop().create_task(self._spell(forecast, ticket, size, entry))
        self._spelling.add(task)
        task.add_done_callback(self._spelling.discard)

    async def _spell(self, forecast: Forecast, ticket: Ticket, size: int, entry: Entry) -> None:
        """Tells the index the prompt's blocks, a few at a time so that requests go on in between."""
        try:
            await self._tell_blocks(forecast, ticket, size)
        except Exception:  # noqa: BLE001 - told by `note`
            self.faults.note("telling the index of a prompt")
            self._expected.cancel(ticket, monotonic())
        finally:
            self._untokenised.remove(entry)
        forecast.spelled = True
        if forecast.settled is not None:
            self._infer(forecast)

    async def _tell_blocks(self, forecast: Forecast, ticket: Ticket, size: int) -> None:
        asked = forecast.asked
        assert asked.prompt is not None
        assert asked.rendered is not None
        assert asked.speller is not None
        model, name = asked.speller.model, asked.speller.name
        made = await self._tokeniser.blocks(model, asked.rendered, size)
        if made is None:
            return
        forecast.tokens, blocks = made
        if model.by_bytes:
            self._asking.ratio(name).learn(len(asked.prompt), forecast.tokens)
        for at in range(0, len(blocks), SLICE):
            if at:
                await asyncio.sleep(0)
            self._expected.extend(ticket, blocks[at : at + SLICE], monotonic())

    def first_token(self, forecast: Forecast) -> None:
        """The prompt is computed."""
        forecast.replica.work.computed(forecast.job)

    def failed(self, forecast: Forecast) -> None:
        """The attempt came to nothing: nothing is expected of it."""
        self._close(forecast)
        self._expect_no_more(forecast)

    def end(self, forecast: Forecast, usage: Usage, series: Series) -> None:
        """The answer ended; what the engine said of tokens."""
        if forecast.ended:
            return
        self._close(forecast)
        ticket, prompt, delivered = forecast.ticket, usage.prompt, usage.cached
        if ticket is not None:
            now = monotonic()
            if self._trials.followed(forecast.replica):
                wait = ANNOUNCED if forecast.spelled else SOON  # or what was evicted since would be expected anew
                asyncio.get_running_loop().call_later(wait, self._expect_no_more, forecast)
            elif prompt is None:
                self._expected.cancel(ticket, now)
            else:
                forecast.settled = prompt, delivered
                if forecast.spelled:
                    self._infer(forecast)
        if prompt is not None and forecast.tokens not in (None, prompt):
            self._miscounted(forecast, prompt)
        if forecast.known and prompt is not None and delivered is not None:
            self._judge(forecast, prompt, delivered, series)

    def _expect_no_more(self, forecast: Forecast) -> None:
        if forecast.ticket is not None:
            self._expected.cancel(forecast.ticket, monotonic())
        if forecast.entry is not None:
            self._untokenised.remove(forecast.entry)

    def _close(self, forecast: Forecast) -> None:
        forecast.ended = True
        forecast.replica.work.end(forecast.job)

    def _infer(self, forecast: Forecast) -> None:
        assert forecast.ticket is not None
        assert forecast.settled is not None
        prompt, delivered = forecast.settled
        self._inferred.finish(forecast.ticket, prompt, delivered, monotonic())

    def _miscounted(self, forecast: Forecast, prompt: int) -> None:
        """The engine made another prompt of the request than was made here."""
        self._miscounts += 1
        if self._miscounts & (self._miscounts - 1) == 0:  # the 1st, 2nd, 4th, 8th ... time
            model = "" if forecast.asked.speller is None else forecast.asked.speller.name
            logger.warning(
                "a prompt of %s has %d tokens at %s and %s here, %d such so far: is the engine's chat template another one?",
                model,
                prompt,
                forecast.replica.name,
                forecast.tokens,
                self._miscounts,
            )

    def _judge(self, forecast: Forecast, prompt: int, delivered: int, series: Series) -> None:
        """Compare what was predicted with what came."""
        replica = forecast.replica
        size = replica.block_size or 1
        for name in self._names(replica):
            known = self.index.replicas[name]
            size = known.granularity.tokens if known.granularity is not None else known.block_size or size
        available, routed = (usable(held, prompt, size) for held in (forecast.available, forecast.routed))
        series.matched += prompt
        series.available += available
        series.routed += routed
        series.matched_delivered += delivered
        if forecast.in_flight:
            series.in_flight += routed
            return  # a twin was still being computed: neither right nor wrong
        prediction = replica.prediction
        was_missing = prediction.missing
        prediction.judge(routed, delivered)
        if prediction.judged == 1:  # unknown until now, and not shown
            self._metrics.prediction_error.labels(replica.name).set_function(lambda: prediction.error or 0.0)
        replica.faith = prediction.faith
        if prediction.missing != was_missing:
            self._weigh()
        if not prediction.uncertain and replica.name in self.index.replicas:
            self.index.learn_granularity(replica.name, routed, delivered)

    def report(self) -> dict[str, Any]:
        """For people."""
        return {
            "blocks": self.index.forest.blocks,
            "blocks_limit": self.index.limit,
            "unrendered_requests": dict(sorted(self._asking.unrendered.items())),
            "prompts_not_tokenised": self._tokeniser.left_out,
            "prompts_miscounted": self._miscounts,
            "bytes_per_token": self._asking.ratios(),
            "faults": self.faults.count,
        }
