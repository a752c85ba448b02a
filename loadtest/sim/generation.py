"""One generation request from its submission to its last byte."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from loadtest.sim.answers import Answer, Choice, Usage
from loadtest.sim.asks import Refused
from loadtest.sim.engine import Engine, Inbox, Stream, Token
from loadtest.sim.hashing import ALGORITHMS
from loadtest.sim.request import Request
from loadtest.sim.text import Writer
from loadtest.sim.tokens import Language


class Generation:
    """Requests for each choice of an ask, submitted when it is made; leave() releases what has not ended.

    details: whether cached tokens are reported. answer_tokens: mean length of an answer that max_tokens does not cut off.
    """

    def __init__(
        self,
        engine: Engine,
        language: Language,
        answer: Answer,
        *,
        details: bool,
        answer_tokens: int,
    ) -> None:
        self._engine = engine
        self._language = language
        self._answer = answer
        self._details = details
        self._inbox = Inbox()
        self._choices = [Choice(index) for index in range(answer.ask.choices)]
        self._streams: list[Stream] = []
        try:
            for choice in self._choices:
                self._streams.append(self._submit(choice.index, answer_tokens))
        except ValueError as error:
            self.leave()
            raise Refused(400, str(error), "prompt") from error

    @property
    def tokens(self) -> int:
        """Generated so far."""
        return sum([len(choice.tokens) for choice in self._choices])

    async def events(self) -> AsyncGenerator[bytes]:
        """The server-sent events of the answer; bytes at each step of the engine."""
        opened = False
        while not self._done():
            data = b""
            for token in await self._inbox.take():
                choice = self._choices[token.choice]
                if choice.finish:
                    continue  # computed before the stop string was found
                text = self._take(choice, token)
                usage = self.usage()
                if not opened:
                    data, opened = self._answer.opening(usage), True
                data += self._answer.delta(choice, token.number, text, usage)
            if data:
                yield data
        yield self._answer.closing(self.usage())

    async def whole(self, most: int | None = None) -> bytes | None:
        """The answer at once; None when `most` tokens were generated before its end."""
        while not self._done():
            for token in await self._inbox.take():
                choice = self._choices[token.choice]
                if not choice.finish:
                    self._take(choice, token)
            if most is not None and self.tokens >= most:
                return None
        return self._answer.whole(self._choices, self.usage())

    def leave(self) -> None:
        """Abort what has not ended: the client has left."""
        for stream in self._streams:
            self._engine.abort(stream)

    def usage(self) -> Usage:
        """As vLLM counts: cached tokens of the last prompt, and in a stream those of the first."""
        ask = self._answer.ask
        shown = self._streams[0 if ask.stream else -1].request
        usage = Usage(sum([len(prompt) for prompt in ask.prompts]), self.tokens)
        if self._details:
            usage.cached, usage.created = shown.cached_tokens, shown.created_tokens
        return usage

    def _submit(self, index: int, answer_tokens: int) -> Stream:
        ask, coder = self._answer.ask, self._language.coder
        prompt = ask.prompts[index // ask.n]
        writer = Writer(self._language.words, prompt, variant=index % ask.n, eos=coder.eos, script=ask.script)
        if not ask.ignore_eos:
            writer.length = max(writer.natural_length(answer_tokens), ask.min_tokens, len(ask.script))
        request = Request(
            f"{self._answer.id}-{index}",
            prompt,
            ask.max_tokens or self._engine.shape.max_model_len,
            self._engine.shape.block_size,
            salt=ask.salt,
            lora=ask.lora,
            eos=None if ask.ignore_eos else coder.eos,
            read_cache=ask.read_cache,
            session=ask.session,
            hashing=ALGORITHMS[self._engine.shape.algorithm],
        )
        return self._engine.submit(request, writer, self._inbox, index)

    def _done(self) -> bool:
        return all(choice.finish for choice in self._choices)

    def _take(self, choice: Choice, token: Token) -> str:
        """Add a token; returns the text that can be sent: nothing of it may become part of a stop string."""
        before = len(choice.text)
        choice.text += self._text(len(choice.tokens), token)
        choice.tokens.append(token.number)
        choice.finish = token.finish
        held = 0
        if stops := self._answer.ask.stop:
            longest = max(map(len, stops))
            found = [(at, stop) for stop in stops if (at := choice.text.find(stop, max(0, before - longest))) >= 0]
            if found:
                at, choice.stop_reason = min(found)
                choice.text, choice.finish = choice.text[:at], "stop"
                self._engine.end_early(self._streams[choice.index])
            held = longest - 1
        end = len(choice.text) if choice.finish else max(choice.sent, len(choice.text) - held)
        text = choice.text[choice.sent : end]
        choice.sent = end
        return text

    def _text(self, number: int, token: Token) -> str:
        coder = self._language.coder
        if token.finish == "stop" and token.number == coder.eos:
            return ""
        known = self._streams[token.choice].writer.text(number, token.number)
        return coder.decode([token.number]) if known is None else known
