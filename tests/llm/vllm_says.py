"""For the engine's Python: the prompts that vLLM's own code makes of requests. No engine, no model, no network.

    python vllm_says.py < cases.json > texts.json

In: {"templates": {name: source}, "requests": [[route, body], ...]}. Out: {name: [text, or null where vLLM refuses, ...]}.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found]
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest  # type: ignore[import-not-found]
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages  # type: ignore[import-not-found]
from vllm.entrypoints.openai.chat_completion.protocol import (  # type: ignore[import-not-found]
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # type: ignore[import-not-found]
from vllm.entrypoints.openai.responses.utils import (  # type: ignore[import-not-found]
    construct_input_messages,
    construct_tool_dicts,
)
from vllm.renderers.chat_utils import parse_chat_messages  # type: ignore[import-not-found]
from vllm.renderers.hf import (  # type: ignore[import-not-found]
    resolve_chat_template_content_format,
    safe_apply_chat_template,
)
from vllm.renderers.params import merge_kwargs  # type: ignore[import-not-found]

MODEL = SimpleNamespace(
    multimodal_config=None,
    enable_prompt_embeds=False,
    is_multimodal_model=False,
    max_model_len=8192,
    revision=None,
    code_revision=None,
    tokenizer_revision=None,
    trust_remote_code=False,
    tokenizer="t",
    model="t",
)
EFFORTS = ("low", "medium", "high", "xhigh", "max")


class Engine:
    """The parts of a server that make prompts, with one chat template."""

    def __init__(self, template: str) -> None:
        self.template = template
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>"
        )
        try:
            self.merge = AnthropicServingMessages._detect_merge_inline_system(template)
        except Exception:  # noqa: BLE001
            self.merge = True  # a server with this template would not start

    def text(self, request: Any, messages: Any, tools: Any, defaults: Any = None) -> str:
        arguments = merge_kwargs(defaults, {"tools": tools, "tokenize": False})
        params = request.build_chat_params(self.template, "auto").with_defaults(arguments)
        form = resolve_chat_template_content_format(
            params.chat_template, params.chat_template_kwargs.get("tools"), "auto", self.tokenizer, model_config=MODEL
        )
        conversation, _, _ = parse_chat_messages(messages, MODEL, form)
        kwargs = params.get_apply_chat_template_kwargs()
        text: str = safe_apply_chat_template(MODEL, self.tokenizer, conversation, **kwargs)
        return text

    def chat(self, body: Any) -> str:
        request = ChatCompletionRequest.model_validate(body)
        return self.text(request, request.messages, self.tools(request))

    def tools(self, request: Any) -> Any:
        return None if request.tools is None else [tool.model_dump() for tool in request.tools]

    def messages(self, body: Any) -> str:
        asked = AnthropicMessagesRequest.model_validate(body)
        effort = "none"
        if asked.thinking is not None and asked.thinking.type == "disabled":
            probe = [{"role": "user", "content": "Hi"}]
            probed = {e: self.try_chat({"messages": probe, "reasoning_effort": e}) for e in ("none", *EFFORTS)}
            none = probed.pop("none")
            effort = "low" if none is None or none in probed.values() else "none"
        request = AnthropicServingMessages.to_chat_completion_request(
            asked, merge_inline_system=self.merge, disabled_thinking_effort=effort
        )
        return self.text(request, request.messages, self.tools(request))

    def try_chat(self, body: Any) -> str | None:
        try:
            return self.chat(body)
        except Exception:  # noqa: BLE001 - whatever vLLM raises is a refusal
            return None

    def responses(self, body: Any) -> str:
        request = ResponsesRequest.model_validate(body)
        tools = construct_tool_dicts(request.tools, request.tool_choice)
        messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
        defaults = request.build_chat_params(self.template, "auto").with_defaults({}).chat_template_kwargs
        return self.text(request, messages, tools, defaults)

    def prompt(self, route: str, body: Any) -> str | None:
        work = {"chat/completions": self.chat, "messages": self.messages, "responses": self.responses}
        try:
            return work[route.removeprefix("/v1/")]({"model": "m", **copy.deepcopy(body)})
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises is a refusal
            if os.environ.get("WHY"):
                print(f"{route} {json.dumps(body)[:200]}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            return None


def main() -> None:
    cases = json.load(sys.stdin)
    said = {}
    for name, template in cases["templates"].items():
        engine = Engine(template)
        said[name] = [engine.prompt(route, body) for route, body in cases["requests"]]
    json.dump(said, sys.stdout, ensure_ascii=False, indent=0)


if __name__ == "__main__":
    main()
