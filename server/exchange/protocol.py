"""The client's connection: uvicorn's protocol, with the proxied POSTs taken out before they become ASGI.

Everything else on the same connection stays uvicorn's and goes to FastAPI. uvicorn's class is not a stable interface, so
its version is pinned and what is used of it is tested. Used of it: the parser callbacks, `cycle` (the request last read),
`pipeline` (requests read before their turn), `flow`, `on_response_complete`, `shutdown`.
"""

from __future__ import annotations

import asyncio
import logging
import urllib.parse
from time import monotonic
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kvgate.errors import Problem
from server.exchange.answer import AnswerWriter
from server.exchange.exchange import NEVER, Exchange
from server.exchange.http1 import RequestHead
from server.gateway import Gateway
from server.routes import ROUTES, Route

LINGER_SECONDS = 2.0  # for a client that is still sending what was refused, so that it can read why
UPGRADE_HEADERS = (b"upgrade", b"http2-settings")
MAX_PIPELINED = 32  # requests read ahead on one connection

logger = logging.getLogger("kvgate")


class ClientConnection(HttpToolsProtocol):
    """One client's connection. `deadline` (monotonic seconds) is when its patience for the client ends."""

    def __init__(
        self,
        gateway: Gateway,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.gateway = gateway
        self.url = b""  # of the message last begun
        self.deadline = NEVER
        self._in_head = True  # of the next message, or before it
        self._head_bytes = 0  # read of it so far
        self._receiving: Exchange | None = None  # whose body is being read
        self._answering: Exchange | None = None  # whose turn it is
        self._discarding = False  # nothing more is read from this client
        self._unsent = 0  # bytes that the client had not taken at the last sweep

    # -- the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.gateway.connections.add(self)
        self.deadline = monotonic() + self.gateway.settings.header_timeout

    def connection_lost(self, exc: Exception | None) -> None:
        self.gateway.connections.discard(self)
        self.deadline = NEVER
        for cycle in (self._answering, *(waiting for waiting, _ in self.pipeline)):
            if isinstance(cycle, Exchange):
                cycle.client_gone()
        self._answering = self._receiving = None
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]  # it refers back here, and the collector comes seldom
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        begins = self._head_bytes == 0
        self._head_bytes += len(data)
        behind_offer = None
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, _Enough):
                self._discarding = True
            elif isinstance(error.__context__, _Refused):
                self._refuse(error.__context__.problem)
            else:
                self._fault(error.__context__)
        except httptools.HttpParserError:
            self._refuse(Problem(400, "invalid_http", "The request is not valid HTTP/1.1."))
        except httptools.HttpParserUpgrade as offer:
            behind_offer = data[offer.args[0] :]
        else:
            if not self._in_head:
                self._head_bytes = 0
                if not self._discarding:
                    self.deadline = monotonic() + self.gateway.settings.body_timeout
            elif self._head_bytes:
                self._expect_rest_of_head(begins)
        if behind_offer is not None:  # not in the handler above: there, no error would keep its own context
            self._read_on_without_upgrade(behind_offer)

    def _expect_rest_of_head(self, begins: bool) -> None:
        settings = self.gateway.settings
        if self._head_bytes > settings.max_head_bytes:
            self._refuse(self._head_too_large())
        elif begins:
            self.deadline = monotonic() + settings.header_timeout

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._answering is not None:
            self._answering.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._answering is not None:
            self._answering.resume()

    # -- the parser

    def on_message_begin(self) -> None:
        if self._discarding or self.transport.is_closing():
            raise _Enough  # the last answer is given: what follows it in the same read would be done, and never answered
        self.url = b""
        self.headers = []
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer is no header
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():  # it is read once more, without the offer
            return
        limit = self.gateway.settings.max_head_bytes
        if self._head_bytes > limit:  # counts what followed the head in the same read, too
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > limit:
                raise _Refused(self._head_too_large())
        head, version = RequestHead(self.headers), self.parser.get_http_version()
        fault = head.fault(version)
        if fault is not None:
            raise _Refused(Problem(400, "invalid_http", fault))
        self._in_head = False
        self._head_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _Refused(Problem(400, "too_many_pipelined", "Too many requests are pipelined on one connection."))
        found = find_route(self.parser.get_method(), self.url)
        if found is None:
            self._to_asgi(head)
        else:
            self._to_exchange(*found, head, version == "1.0")

    def on_body(self, body: bytes) -> None:
        if self._receiving is not None:
            self._receiving.receive(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        if self.parser.should_upgrade():
            return
        self.deadline = NEVER
        exchange, self._receiving = self._receiving, None
        if exchange is not None:
            exchange.received()
        else:
            super().on_message_complete()
            self._wait_for_next()

    def _read_on_without_upgrade(self, rest: bytes) -> None:
        """An offered upgrade (Java's client offers h2c with every POST) is not taken, and its request is read all the same.

        The parser stops behind such a head and would take the body for the other protocol: a new one reads both again.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(Problem(405, "method_not_allowed", "This server opens no tunnels."))
            return
        lines = [method, b" ", self.url, b" HTTP/%b\r\n" % self.parser.get_http_version().encode("ascii")]
        for name, value in self.headers:
            if name == b"connection":
                kept = [token for token in value.split(b",") if token.strip().lower() not in UPGRADE_HEADERS]
                lines += (b"connection: ", b",".join(kept) or b"keep-alive", b"\r\n")
            elif name not in UPGRADE_HEADERS:
                lines += (name, b": ", value, b"\r\n")
        self.parser = httptools.HttpRequestParser(self)
        self._head_bytes = 0
        self.data_received(b"".join(lines) + b"\r\n" + rest)

    def _to_asgi(self, head: RequestHead) -> None:
        url, headers = asgi_target(self.url), self.headers
        super().on_message_begin()
        self.url, self.expect_100_continue = url, head.expects
        self.headers = self.scope["headers"] = headers
        super().on_headers_complete()
        if self.gateway.draining:
            self.cycle.keep_alive = False
        if self.pipeline:
            self.flow.resume_reading()  # uvicorn stopped reading; then a client that leaves would not be noticed

    def _to_exchange(self, route: Route, target: bytes, head: RequestHead, http10: bool) -> None:
        keep_alive = not http10 and self.parser.should_keep_alive() and not self.gateway.draining
        earlier = self.cycle
        exchange = Exchange(self, route, target, head, http10, keep_alive)
        self.cycle = exchange  # type: ignore[assignment]  # it stands in for uvicorn's
        self._receiving = exchange
        if earlier is None or earlier.response_complete:
            self._answering = exchange
        else:
            exchange.pipelined = True
            self.pipeline.appendleft((self.cycle, self.app))
        if not exchange.authorize():
            return
        if head.length is not None and head.length > self.gateway.settings.max_body_bytes:
            exchange.refuse(exchange.too_large())
        elif not exchange.pipelined:
            exchange.begin()

    # -- the turn of answers

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if isinstance(cycle, Exchange):
            self._answering = cycle
            self.loop.call_soon(cycle.begin)
        else:
            super()._start_asgi_task(cycle, app)

    def answered(self, exchange: Exchange) -> None:
        """An exchange gave its answer, whole or cut; `keep_alive` says whether the connection goes on."""
        self._answering = None
        if exchange.keep_alive:
            self.on_response_complete()
            return
        self.server_state.total_requests += 1
        if (
            self._discarding
            and not self._in_head
            and not self.transport.is_closing()
            and self.transport.can_write_eof()
        ):
            # Closing while bytes are unread would reset the connection, and the client might never see the answer
            self.transport.write_eof()
            self.deadline = monotonic() + LINGER_SECONDS
        else:
            self.transport.close()
            self.deadline = monotonic() + self.gateway.settings.idle_timeout

    def on_response_complete(self) -> None:
        """As uvicorn's, with the sweep in place of a timer for each request."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self.deadline = monotonic() + self.gateway.settings.idle_timeout
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        else:
            self._wait_for_next()

    def _wait_for_next(self) -> None:
        if self._in_head and self._head_bytes == 0 and (self.cycle is None or self.cycle.response_complete):
            self.deadline = monotonic() + self.gateway.idle_seconds

    # -- the gateway's end

    def shutdown(self) -> None:
        """The listeners are closed. The last answer says that the connection ends; where none is due, one may yet be asked for.

        An answer whose head is out cannot say it any more: the connection then ends with the next one, or idle.
        """
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_next()
        elif not self.cycle.response_started:
            self.cycle.keep_alive = False

    def part(self, problem: Problem) -> None:
        """Ends the connection with this answer, where one is due, or in the middle of one."""
        if self._answering is not None and not self._answering.response_complete:
            self._answering.refuse(problem)
        else:
            self.transport.close()

    # -- what is refused, and what takes too long

    def discard_rest(self) -> None:
        """Reads no more of this client."""
        self._discarding = True
        self._receiving = None

    def _head_too_large(self) -> Problem:
        limit = self.gateway.settings.max_head_bytes
        return Problem(431, "head_too_large", f"The request's head exceeds {limit} bytes (--max-head-bytes).")

    def _refuse(self, problem: Problem) -> None:
        """Answers what could not be read as a request; what was asked before on this connection is still answered."""
        self._discarding = True
        exchange, self._receiving = self._receiving, None
        if exchange is not None and not exchange.response_complete:
            exchange.refuse(problem)
        elif self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
        elif not self._in_head and self.cycle is not None:
            self.transport.close()  # its request was answered before its body had come: it has no second answer
        elif not self.transport.is_closing():
            answer = AnswerWriter(self.transport, http10=False, keep_alive=False)
            found = find_route(b"POST", self.url)  # as far as it was read
            answer.problem(problem, "openai" if found is None else found[0].dialect, self.gateway.new_id())
            if self.transport.can_write_eof():
                self.transport.write_eof()
                self.deadline = monotonic() + LINGER_SECONDS
            else:
                self.transport.close()

    def _fault(self, cause: BaseException | None) -> None:
        """An error of ours while a request was read: it is logged and answered, and the connection ends."""
        logger.error("A fault in the gateway, please report it", exc_info=cause)
        problem = Problem(500, "internal_error", "The gateway failed. The request was not completed.")
        exchange, self._discarding = self._answering, True
        if exchange is not None and not exchange.response_complete:
            exchange.refuse(problem)
        else:
            self._refuse(problem)

    def sweep(self, now: float) -> None:
        """Ends what has passed its deadline. Called a few times within the shortest of them."""
        answering = self._answering
        if answering is not None and answering is not self._receiving:
            if now > answering.deadline:
                answering.timed_out()
            return
        if now <= self.deadline:
            return
        unsent = self.transport.get_write_buffer_size()
        if unsent and (self._unsent == 0 or unsent < self._unsent):  # a slow reader, but it reads
            self._unsent = unsent
            self.deadline = now + self.gateway.settings.idle_timeout
        elif unsent or self.transport.is_closing():
            self.transport.abort()
        elif self._discarding:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()  # it has its answer, and lingered
        elif self._head_bytes or not self._in_head:
            self._refuse(Problem(408, "request_timeout", "The request did not arrive in time."))
        else:
            self.transport.close()


class _Refused(Exception):
    """Leaves the parser's callback; the problem is answered once the parser has returned."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class _Enough(Exception):
    """Leaves the parser's callback: nothing more is read of this client."""


def asgi_target(url: bytes) -> bytes:
    """The target of a request for ASGI, with a path in any case; raises what the connection refuses."""
    try:
        path = httptools.parse_url(url).path
    except httptools.HttpParserInvalidURLError:
        raise _Refused(Problem(400, "invalid_http", "The request's target is not valid.")) from None
    return url if path else b"/"  # http://host alone


def find_route(method: bytes, url: bytes) -> tuple[Route, bytes] | None:
    """The proxied route of a request line and the target for the engine, or None where the gateway answers itself."""
    if method != b"POST":
        return None
    route = ROUTES.get(url)
    if route is not None:
        return route, url
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        return None
    path = urllib.parse.unquote_to_bytes(parsed.path or b"")
    route = ROUTES.get(path)
    if route is None:
        return None
    return route, path + (b"?" + parsed.query if parsed.query else b"")
