"""Whether a chat template takes a message's content as one string or as OpenAI's list of parts.

vLLM reads this off the template's syntax tree ("auto"): a template that loops over a message's content takes parts. The same
reading is made here, because the two give different text for the same request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from jinja2 import Environment, TemplateError, nodes

ContentFormat = Literal["string", "openai"]


class _Unclear(Exception):
    """The template unpacks what is looked for, which the reading cannot follow."""


def content_format(environment: Environment, source: str) -> ContentFormat:
    """`environment` knows the template's tags. A template that cannot be read takes strings."""
    try:
        root = environment.parse(source)
        return "openai" if any(_content_loops(root)) else "string"
    except (TemplateError, _Unclear):
        return "string"


def _plain(node: nodes.Node | None) -> nodes.Node | None:
    """Without filters, tests and slices around it: `messages[1:] | list` is still the messages."""
    while True:
        if isinstance(node, nodes.Filter):
            if node.node is None:
                return None
            node = node.node
        elif isinstance(node, nodes.Test) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
            node = node.node
        else:
            return node


def _is_name(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _is(node: nodes.Node, name: str) -> bool:
    """The variable itself."""
    return _is_name(_plain(node), name)


def _is_content(node: nodes.Node, message: str) -> bool:
    """`message.content` or `message["content"]`."""
    plain = _plain(node)
    if isinstance(plain, nodes.Getitem):
        return (
            _is_name(plain.node, message) and isinstance(plain.arg, nodes.Const) and bool(plain.arg.value == "content")
        )
    return isinstance(plain, nodes.Getattr) and _is_name(plain.node, message) and plain.attr == "content"


def _target(node: nodes.Node) -> str:
    if not isinstance(node, nodes.Name):
        raise _Unclear
    return node.name


def _message_lists(root: nodes.Template) -> list[str]:
    """Every variable that is the messages, or was assigned from one that is."""
    found, pending = ["messages"], ["messages"]
    while pending:
        name = pending.pop(0)
        for assignment in root.find_all(nodes.Assign):
            if _is(assignment.node, name):
                target = _target(assignment.target)
                if target not in found:
                    pending.append(target)
                    found.append(target)
    return found


def _message_names(root: nodes.Template) -> list[str]:
    """Every variable that a loop over the messages binds."""
    lists = _message_lists(root)
    return [
        _target(loop.target) for loop in root.find_all(nodes.For) if any(_is(loop.iter, messages) for messages in lists)
    ]


def _content_parameters(root: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    """The parameters of the macro that some call gives a message's content."""
    names = [argument.name for argument in macro.args]
    found: set[str] = set()
    for call in root.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given = [*zip(names, call.args, strict=False)]
        given += [(keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in names]
        found.update(name for name, value in given if any(_is_content(value, message) for message in messages))
    return found


def _content_loops(root: nodes.Template) -> Iterator[bool]:
    """True for each loop over the parts of a message."""
    messages = _message_names(root)
    in_macro: set[int] = set()
    parameters: dict[int, set[str]] = {}
    for macro in root.find_all(nodes.Macro):
        names = _content_parameters(root, macro, messages)
        for loop in macro.find_all(nodes.For):
            in_macro.add(id(loop))
            if names:
                parameters[id(loop)] = names
    for loop in root.find_all(nodes.For):
        over = loop.iter
        if any(_is_content(over, message) for message in messages) or (
            isinstance(over, nodes.Name)
            and (over.name in parameters.get(id(loop), ()) or (over.name == "content" and id(loop) not in in_macro))
        ):
            _target(loop.target)
            yield True
