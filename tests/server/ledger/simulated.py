"""A gateway with the policy `cost` before simulated engines that publish KV events, all with a toy of a byte-level tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from loadtest.sim.asks import Model
from loadtest.sim.engine import Shape
from loadtest.sim.fleet import Fleet
from loadtest.sim.profile import given
from loadtest.sim.replica import EventPlaces, SimSettings
from loadtest.sim.scheduler import Limits
from loadtest.sim.text import FIRST_WORDS, WORDS
from loadtest.sim.tokens import Language
from server.ledger.ledger import Ledger
from server.replica import Replica
from tests.llm.cases import TEMPLATES
from tests.llm.toys import write_folder
from tests.server.running import RunningGateway, running_gateway

BLOCK = 16
PATIENCE = 10.0  # s, for what has to come in the end


@lru_cache
def word_tokenizer() -> Tokenizer:
    """Byte-level, with a token for each of a few words."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<|im_start|>", "<|im_end|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*FIRST_WORDS, " " + " ".join(WORDS)] * 3, trainer)
    return made


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens as predicted at dispatch and as delivered; None where nothing was predicted."""

    replica: str
    routed: int | None
    cached: int
    prompt: int
    headers: dict[str, str]


@dataclass(slots=True)
class Stand:
    """The gateway and its fleet."""

    gateway: RunningGateway
    fleet: Fleet
    session: aiohttp.ClientSession

    async def complete(self, prompt: object, **more: Any) -> Answer:
        return await self.ask("/v1/completions", {"prompt": prompt, "max_tokens": 1, **more})

    async def ask(self, path: str, body: dict[str, Any], **headers: str) -> Answer:
        async with self.session.post(f"{self.gateway.url}{path}", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            usage = (await response.json())["usage"]
            told = {name.lower(): value for name, value in response.headers.items()}
        routed = told.get("x-kvgate-routed-tokens")
        return Answer(
            told["x-kvgate-replica"],
            None if routed is None else int(routed),
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["prompt_tokens"],
            told,
        )

    async def get(self, path: str) -> dict[str, Any]:
        async with self.session.get(f"{self.gateway.url}{path}") as response:
            assert response.status == 200, await response.text()
            body: dict[str, Any] = await response.json()
            return body

    @property
    def ledger(self) -> Ledger:
        ledger = self.gateway.gateway.ledger
        assert ledger is not None
        return ledger

    @property
    def replicas(self) -> list[Replica]:
        return self.gateway.gateway.replicas.all

    @property
    def idle(self) -> bool:
        """Nothing is expected of any request: what was sent is announced, or came to nothing."""
        ledger = self.ledger
        pending = sum(len(known.pending) for known in ledger.index.replicas.values())
        return not (pending or ledger._spelling or ledger._untokenised._prompts)

    async def until(self, true: Callable[[], bool]) -> None:
        """Returns once it is true; fails after PATIENCE."""
        for _ in range(round(PATIENCE / 0.01)):
            if true():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it did not become true")


@asynccontextmanager
async def stand(
    tmp_path: Path,
    replicas: int = 2,
    *,
    blocks: int = 400,
    events: bool = True,
    details: bool = True,
    replay: bool = True,
    by_bytes: bool = True,
    engines_file: Path | None = None,
    **settings: object,
) -> AsyncIterator[Stand]:
    """Once every engine's self-test is over. blocks: of 16 tokens, at each engine. replay: whether the gateway knows where events
    are replayed. by_bytes: whether the model's prompts are matched so. engines_file: to list the engines in. `settings`: of the
    gateway."""
    tokenizer = Tokenizer.from_str(word_tokenizer().to_str())
    if not by_bytes:
        tokenizer.normalizer = normalizers.NFKC()
    folder = write_folder(tmp_path / "model", tokenizer, chat_template_jinja=TEMPLATES["plain"])
    shape = Shape(given(1e6, 0.0002), BLOCK, blocks, (blocks - 1) * BLOCK, Limits(2048, 16))
    places = EventPlaces(folder=str(tmp_path)) if events else None
    sim = SimSettings(
        shape,
        Model("toy", str(folder), shape.max_model_len, {}),
        Language.of_folder(folder),
        replicas=replicas,
        details=details,
        events=places,
    )
    async with Fleet(sim) as fleet, aiohttp.ClientSession() as session:
        urls = [replica.url for replica in fleet.replicas]
        stated = "off"
        if places is not None:
            stated = ",".join(
                f"{url.removeprefix('http://')}={where.publish}" + (f"+{where.replay}" if replay else "")
                for url, where in ((r.url, places.of("127.0.0.1", n, r.port)) for n, r in enumerate(fleet.replicas))
            )
        if engines_file is not None:
            engines_file.write_text("\n".join(urls))  # noqa: ASYNC240
            urls, settings["engines_file"] = [], str(engines_file)
        async with running_gateway(*urls, policy="cost", kv_events=stated, **settings) as gateway:
            made = Stand(gateway, fleet, session)
            await made.until(lambda: all(replica.self_test is not None for replica in made.replicas))
            yield made
