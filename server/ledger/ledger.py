"""What every replica holds, what of a prompt that is, and whether it was so.

A request is `ask`ed about when it is admitted, `look`ed up when it is its turn, `sent` to a replica, and its forecast ends
exactly once, in `end`. All of it runs in the event loop; prompts are tokenised in a thread of their own, afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import aiohttp

from kvcache.expected import Expected, Ticket
from kvcache.index import PrefixIndex
from kvcache.inferred import Inferred
from kvcache.match import Match, usable
from kvcache.spelling import packed
from kvgate.settings import Settings
from llm.prompt import Unrendered
from llm.tokenizer import BytesPerToken
from server.ledger.feeds import EventFeeds
from server.ledger.forecast import Forecast
from server.ledger.selftest import SelfTest, Verdict
from server.ledger.shelf import Shelf, Speller, parse_folders
from server.ledger.sources import EventSources
from server.ledger.tokeniser import Tokeniser
from server.ledger.untokenised import Entry, Untokenised
from server.metrics import GatewayMetrics, Series
from server.replica import Replica
from server.routing.asked import Asked
from server.routing.cost import RATE
from server.usage import Usage

logger = logging.getLogger("kvgate")

OUTPUT = 256  # tokens that a request is taken to generate where it sets no limit; an estimate for KV pressure only
ANNOUNCED = 2.0  # s that events may take after a request ended; then what they did not confirm is expected no more
LONGEST = 900.0  # s after which nothing is expected of a request any more
SLACK = 1.5  # times the time that a prompt should take, until it counts as computed unseen
TICK = 0.5  # s between two roundups
EVENTS_SECONDS = 3.0  # that an engine's events may take to be followed once it is up, before it is tested without them
TEST_SECONDS = 60.0  # for one request of the self-test: a busy engine lets it wait
SLICE = 128  # blocks told to the index at once
TIDY = 2048  # blocks of dropped replicas put away in each


@dataclass(slots=True)
class _Known:
    """A replica. followed: its events are. up_since: monotonic seconds, None while it is down. tested: since then."""

    followed: bool = False
    up_since: float | None = None
    tested: bool = False
    testing: asyncio.Task[None] | None = None


class Ledger:
    """One for a gateway, for all its models. `start` and `stop` are called by upkeep."""

    def __init__(self, settings: Settings, metrics: GatewayMetrics, engine_headers: Mapping[str, str]) -> None:
        """`engine_headers` go with the gateway's own requests to engines."""
        self.index = PrefixIndex()
        self._expected = Expected(self.index)
        self._inferred = Inferred(self._expected)
        self._shelf = Shelf(parse_folders(settings.tokenizer), self._opened)
        self._tokeniser = Tokeniser()
        self._untokenised = Untokenised()
        self._spelling: set[asyncio.Task[None]] = set()
        self._metrics = metrics
        self._sources = EventSources.parse(settings.kv_events)
        self._feeds: EventFeeds | None = None
        self._replicas: dict[Replica, _Known] = {}
        self._engine_headers = engine_headers
        self._session: aiohttp.ClientSession | None = None
        self._per_token: dict[str, BytesPerToken] = {}  # by model
        self._unrendered: dict[str, int] = {}  # requests by reason
        self._miscounts = 0
        self._ticking: asyncio.Task[None] | None = None

    # -- life

    async def start(self) -> None:
        self._feeds = EventFeeds(
            self.index, lambda replica: self._shelf.speller(replica.models), self._changed, self._sources, self._metrics
        )
        for replica in self._replicas:
            self._feeds.add(replica)
        timeout = aiohttp.ClientTimeout(total=TEST_SECONDS)
        self._session = aiohttp.ClientSession(headers=self._engine_headers, timeout=timeout)
        self._ticking = asyncio.create_task(self._tick())

    async def stop(self) -> None:
        tasks = {known.testing for known in self._replicas.values()} | self._spelling | {self._ticking}
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        if self._feeds is not None:
            await self._feeds.stop()
        await self._shelf.stop()
        self._tokeniser.stop()

    # -- replicas come and go

    def add(self, replica: Replica) -> None:
        """From now on its events are followed, if it has any."""
        if replica not in self._replicas:
            self._replicas[replica] = _Known()
            if self._feeds is not None:
                self._feeds.add(replica)

    def drop(self, replica: Replica) -> None:
        """It is gone for good, and so is what it held."""
        known = self._replicas.pop(replica, None)
        if known is None:
            return
        if known.testing is not None:
            known.testing.cancel()
        if self._feeds is not None:
            self._feeds.drop(replica)
        self._inferred.drop(replica.name, monotonic())

    def learn(self, replica: Replica) -> None:
        """It answered, and said which models it serves."""
        self.add(replica)
        self._shelf.learn(replica.models)
        if self._feeds is not None:
            self._feeds.wake(replica)

    def _opened(self) -> None:
        for replica in self._replicas:
            if self._feeds is not None:
                self._feeds.wake(replica)

    def _changed(self, replica: Replica) -> None:
        """A batch of its events was applied, or whether it has any changed."""
        assert self._feeds is not None
        if replica not in self._replicas:
            return
        names = self._feeds.names(replica)
        if names:
            self._inferred.release(replica.name)
        self._replicas[replica].followed = bool(names)
        replica.prediction.uncertain = any(self.index.uncertain(name) for name in names)
        replica.faith = replica.prediction.faith

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            now = monotonic()
            self._expected.age(now)
            self._inferred.age(now)
            self.index.tidy(TIDY, now)
            for replica, known in self._replicas.items():
                self._look_after(replica, known, now)

    def _look_after(self, replica: Replica, known: _Known, now: float) -> None:
        """Begins the self-test of an engine that has come up."""
        if not replica.up:
            known.up_since = None
            if self._inferred.knows(replica.name):
                self.index.clear(replica.name, now)  # whatever comes back may be another process
            return
        if known.up_since is None:
            known.up_since, known.tested, replica.self_test = now, False, None
        speller = self._shelf.speller(replica.models)
        if speller is None and replica.self_test is None and (why := self._shelf.why_not(replica.models)):
            replica.self_test = Verdict(problem=why).report()
        patient = not known.followed and now - known.up_since < EVENTS_SECONDS
        if known.tested or speller is None or patient or replica.block_size is None:
            return
        known.tested = True
        known.testing = asyncio.create_task(self._test(replica, speller, known.followed))

    async def _test(self, replica: Replica, speller: Speller, followed: bool) -> None:
        assert self._session is not None
        assert replica.block_size is not None
        own = set(self._names(replica))

        def match(fields: dict[str, Any]) -> Match:
            asked = self.ask("/v1/completions", speller.name, fields, fields["cache_salt"])
            self.look(asked)
            tokens = {name: held for name, held in asked.match.tokens.items() if name in own}
            return Match(tokens, max(tokens.values(), default=0))

        url, size = str(replica.url), replica.block_size
        verdict = await SelfTest(self._session, url, speller.name, speller.model, size, match, followed).run()
        replica.self_test = verdict.report()
        if verdict.strange:
            self._shelf.distrust(speller)
        if verdict.problem:
            logger.warning("self-test of %s: %s", replica.name, verdict.problem)
        elif followed:
            logger.info(
                "self-test of %s: announced = predicted = delivered = %d tokens", replica.name, verdict.delivered
            )
        else:
            logger.info("self-test of %s: it delivers, and is inferred, having no KV events", replica.name)

    # -- a request

    def ask(self, route: str, model: str, fields: Mapping[str, Any], salt: str | None) -> Asked:
        """What can be known of a request whose body says `fields`, for the served `model`; `salt` is what the engine gets."""
        asked = Asked(output=_output(fields))
        served = self._shelf.of(model)
        if served is None:
            self._left("no_model")
            return asked
        made = served.speller.model.render(route, fields)
        if isinstance(made, Unrendered):
            self._left(made.reason)
            return asked
        if len(made) != 1:
            self._left("several_prompts")
            return asked
        prompt, rendered_by = made[0], served.speller.model
        asked.namespace = served.speller.namespace(served.lora, salt)
        asked.rendered, asked.speller = prompt, served.speller
        if rendered_by.by_bytes:
            first = rendered_by.spelled(prompt)[0]
            assert isinstance(first, bytes)  # what comes before the first image, all of it mostly
            asked.prompt = first
            length = len(prompt.text or "") if prompt.media else len(first)  # all of its text, whatever images make
            asked.tokens = (
                len(prompt.ids) if prompt.ids is not None else self._ratio(served.speller.name).tokens(length)
            )
        else:
            asked.unspelled = True
        return asked

    async def spell(self, asked: Asked) -> None:
        """Makes known the prompt of a model that is matched by tokens; without a word where that fails."""
        assert asked.speller is not None
        assert asked.rendered is not None
        ids = await self._tokeniser.tokens(asked.speller.model, asked.rendered)
        if ids is not None:
            asked.prompt, asked.tokens = packed(ids), len(ids)

    def _left(self, reason: str) -> None:
        self._unrendered[reason] = self._unrendered.get(reason, 0) + 1

    def _ratio(self, model: str) -> BytesPerToken:
        known = self._per_token.get(model)
        if known is None:
            known = self._per_token[model] = BytesPerToken()
        return known

    def look(self, asked: Asked) -> None:
        """What every replica holds of it now."""
        if asked.prompt is None:
            return
        asked.match = self.index.match(asked.prompt, asked.namespace)
        asked.twins = self._untokenised.shared(asked.namespace, asked.prompt)
        if asked.twins:
            asked.match = self._with_twins(asked.match, asked)

    def _with_twins(self, match: Match, asked: Asked) -> Match:
        """With what prompts on their way share beyond what is held; what adds nothing is no twin."""
        tokens, twins = dict(match.tokens), dict[str, int]()
        sizes = self.index.forest.trees.get(asked.namespace, ())
        for name, length in asked.twins.items():
            known = self.index.replicas.get(name)
            if known is not None:
                shared = asked.tokens * length // max(1, len(asked.prompt or b""))
                shared -= shared % (known.block_size or min(sizes, default=1))
                if shared > tokens.get(name, 0):
                    tokens[name], twins[name] = shared, length
        asked.twins = twins
        return replace(match, tokens=tokens, available=max(tokens.values(), default=0))

    def sent(self, asked: Asked, replica: Replica, stream: bool) -> Forecast:
        """It goes to this replica."""
        now = monotonic()
        names = self._names(replica)
        routed = in_flight = 0
        for name in names:
            held = asked.match.tokens.get(name, 0)
            if held > routed:
                routed = held
                in_flight = held if name in asked.twins else self.index.in_flight(asked.match, name)
        miss = max(0, asked.tokens - int(routed * replica.faith))
        rate = replica.prefill.tokens_per_second or RATE
        due = now + (LONGEST if stream else SLACK * (replica.work.queued + miss) / rate)
        job = replica.work.begin(miss, miss + asked.output, due)
        known = asked.prompt is not None and bool(names)
        forecast = Forecast(asked, replica, asked.match.available, routed, in_flight, known, now, job)
        if known:
            self._expect(forecast, names)
        return forecast

    def _names(self, replica: Replica) -> tuple[str, ...]:
        """Its entries in the index."""
        names = self._feeds.names(replica) if self._feeds is not None else ()
        if names:
            return names
        if replica.name not in self.index.replicas or not self._inferred.knows(replica.name):
            blocks = replica.kv_blocks
            if blocks is None:
                return ()
            self._inferred.add(replica.name, blocks)
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
        forecast.ticket = self._expected.begin(name, size, forecast.sent_at + LONGEST, asked.namespace)
        assert asked.prompt is not None
        entry = self._untokenised.add(asked.namespace, asked.prompt, name)  # now: its twin may be next
        task = asyncio.get_running_loop().create_task(self._spell(forecast, forecast.ticket, size, entry))
        self._spelling.add(task)
        task.add_done_callback(self._spelling.discard)

    async def _spell(self, forecast: Forecast, ticket: Ticket, size: int, entry: Entry) -> None:
        """Tells the index the prompt's blocks, a few at a time so that requests go on in between."""
        asked = forecast.asked
        assert asked.prompt is not None
        assert asked.rendered is not None
        assert asked.speller is not None
        model, name = asked.speller.model, asked.speller.name
        try:
            made = await self._tokeniser.blocks(model, asked.rendered, size)
            if made is not None:
                forecast.tokens, blocks = made
                if model.by_bytes:
                    self._ratio(name).learn(len(asked.prompt), forecast.tokens)
                for at in range(0, len(blocks), SLICE):
                    if at:
                        await asyncio.sleep(0)
                    self._expected.extend(ticket, blocks[at : at + SLICE], monotonic())
        finally:
            self._untokenised.remove(entry)
        forecast.spelled = True
        if forecast.settled is not None:
            self._infer(forecast)

    def first_token(self, forecast: Forecast) -> None:
        """The prompt is computed."""
        forecast.replica.work.computed(forecast.job)

    def failed(self, forecast: Forecast) -> None:
        """The attempt came to nothing: nothing is expected of it."""
        self._close(forecast)
        if forecast.ticket is not None:
            self._expected.cancel(forecast.ticket, monotonic())

    def end(self, forecast: Forecast, usage: Usage, series: Series) -> None:
        """The answer ended; what the engine said of tokens."""
        if forecast.ended:
            return
        self._close(forecast)
        ticket, prompt, delivered = forecast.ticket, usage.prompt, usage.cached
        if ticket is not None:
            now = monotonic()
            known = self._replicas.get(forecast.replica)
            if known is not None and known.followed:
                asyncio.get_running_loop().call_later(ANNOUNCED, self._expected.cancel, ticket, now + ANNOUNCED)
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
        prediction.judge(routed, delivered)
        if prediction.judged == 1:  # unknown until now, and not shown
            self._metrics.prediction_error.labels(replica.name).set_function(lambda: prediction.error or 0.0)
        replica.faith = prediction.faith
        if not prediction.uncertain and replica.name in self.index.replicas:
            self.index.learn_granularity(replica.name, routed, delivered)

    def report(self) -> dict[str, Any]:
        """For people."""
        return {
            "blocks": self.index.forest.blocks,
            "blocks_limit": self.index.limit,
            "unrendered_requests": dict(sorted(self._unrendered.items())),
            "prompts_not_tokenised": self._tokeniser.left_out,
            "prompts_miscounted": self._miscounts,
            "bytes_per_token": {name: round(ratio.ratio, 3) for name, ratio in self._per_token.items()},
        }


def _output(fields: Mapping[str, Any]) -> int:
    """Tokens that it may generate, up to what is usual."""
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        value = fields.get(name)
        if type(value) is int:
            return max(0, min(value, OUTPUT))
    return OUTPUT
