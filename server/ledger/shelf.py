"""The models whose prompts can be rendered here: opened once an engine is seen to serve them, checked against that engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvcache.spelling import Namespace, marked, packed_blocks, text_blocks
from kvgate.errors import KvgateError, UsageError
from llm.model import Model, open_model

logger = logging.getLogger("kvgate")


def parse_folders(text: str) -> dict[str, Path]:
    """From `FOLDER` or `model=FOLDER,model=FOLDER`, by model, "" for every other; raises UsageError."""
    folders: dict[str, Path] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, folder = part.rpartition("=")
        if equals and not name:
            raise UsageError(f"--tokenizer: {part!r} is not of the form model=FOLDER")
        if name in folders:
            raise UsageError(f"--tokenizer: {name or 'a folder for all models'!r} is given twice")
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise UsageError(
                f"--tokenizer: {folder} is not a folder; it needs config.json and tokenizer.json of the model"
            )
        folders[name] = path
    return folders


class Speller:
    """How blocks of one model are spelled: server/ledger/feed.py's Speller.

    `name`: a served name of the model. An engine may serve it under several; their blocks lie in one tree, that of the name
    `tree`.
    """

    def __init__(self, model: Model, name: str, tree: str = "") -> None:
        self.model = model
        self.name = name
        self.tree = tree or name

    def blocks(
        self, token_ids: Sequence[int], block_size: int, media: Mapping[int, Sequence[tuple[str, int]]]
    ) -> list[bytes]:
        """Keys of full blocks. Raises ValueError for ids that the model does not have."""
        if not self.model.by_bytes:
            return packed_blocks(token_ids, block_size)
        tokens = self.model.tokenizer.token_bytes(token_ids)
        if not all(tokens):
            raise ValueError("a token id that the tokenizer does not have")
        for number, items in media.items():
            at = number * block_size
            tokens[at : at + block_size] = marked(tokens[at : at + block_size], items)
        return text_blocks(tokens, block_size)

    def namespace(self, lora: str | None, salt: str | None) -> Hashable:
        return Namespace(lora, salt, self.tree)


class Served(NamedTuple):
    """What a served name stands for: a base model, and the adapter on it, if any."""

    speller: Speller
    lora: str | None


class Shelf:
    """Models by their base's served name. `ready` is told when one has been opened."""

    def __init__(self, folders: Mapping[str, Path], ready: Callable[[], None]) -> None:
        self._folders = folders
        self._ready = ready
        self._spellers: dict[str, Speller] = {}
        self._tried: dict[str, set[str]] = {}  # the folders that each was opened from, or failed to open from
        self._served: dict[str, Served] = {}
        self._why_not: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def of(self, served: str) -> Served | None:
        """None while it is not known."""
        return self._served.get(served)

    def speller(self, models: Mapping[str, Mapping[str, Any]]) -> Speller | None:
        """Of the engine that serves these."""
        return next((served.speller for name in models if (served := self._served.get(name)) is not None), None)

    def why_not(self, models: Mapping[str, Mapping[str, Any]]) -> str:
        """Why the prompts of the engine that serves these cannot be known; empty if they can, or it is not known yet."""
        return next((why for name in models if (why := self._why_not.get(name)) is not None), "")

    def learn(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        """An engine serves these: entries of its /v1/models by name."""
        bases = [name for name, entry in models.items() if (entry.get("parent") or name) == name]
        for name in bases:
            if name not in self._spellers:
                folder = self._folder(name, models)
                same = [base for base in bases if self._folder(base, models) == folder] if folder else [name]
                self._find(name, folder, same, models)
        for name, entry in models.items():
            base = entry.get("parent") or name
            if isinstance(base, str) and base in models and (speller := self._spellers.get(base)) is not None:
                self._served[name] = Served(speller, name if base != name else None)

    def _folder(self, name: str, models: Mapping[str, Mapping[str, Any]]) -> str:
        return str(self._folders.get(name) or self._folders.get("") or models[name].get("root") or "")

    def _find(self, name: str, folder: str, same: Sequence[str], models: Mapping[str, Mapping[str, Any]]) -> None:
        """A speller for `name`, among the names that an engine has for the `same` model: its blocks are the same, too."""
        known = next((speller for base in same if (speller := self._spellers.get(base)) is not None), None)
        if known is not None:
            self._spellers[name] = Speller(known.model, name, known.tree)
        elif name == same[0]:
            self._open(name, folder, models)

    def _open(self, name: str, root: str, models: Mapping[str, Mapping[str, Any]]) -> None:
        tried = self._tried.setdefault(name, set())
        if root in tried:
            return
        tried.add(root)
        task = asyncio.create_task(self._load(name, root, dict(models)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, name: str, root: str, models: dict[str, Mapping[str, Any]]) -> None:
        try:
            if not await asyncio.to_thread(Path(root, "config.json").is_file):
                raise UsageError(
                    f"its folder ({root or 'the engine names none'}) is not here: give it with --tokenizer"
                )
            model = await asyncio.to_thread(open_model, Path(root))
        except KvgateError as error:
            self._why_not[name] = f"prompts of {name} are not known before the engine has them: {error}"
            logger.warning("%s", self._why_not[name])
            return
        except Exception as error:  # whatever a file on disk can make the readers do; the gateway goes on without
            self._why_not[name] = f"prompts of {name} are not known: {root} could not be read ({type(error).__name__})"
            logger.exception("%s", self._why_not[name])
            return
        if name in self._spellers:
            return  # meanwhile it was opened from another engine's folder
        how = "bytes" if model.by_bytes else f"tokens, since {model.tokenizer.why_not}"
        logger.info("prompts of %s are matched by %s", name, how)
        self._spellers[name] = Speller(model, name)
        self._why_not.pop(name, None)
        self.learn(models)
        self._ready()

    def distrust(self, speller: Speller) -> None:
        """The engine makes other prompts: what is made here is good for nothing, until the model is loaded from elsewhere."""
        made = speller.model
        self._served = {name: served for name, served in self._served.items() if served.speller.model is not made}
        self._spellers = {name: known for name, known in self._spellers.items() if known.model is not made}

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
