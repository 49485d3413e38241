"""Chats as text: messages, and the templates that write them. Workers; the daemon checks templates.

Standard library only. A template is a table of fixed texts, never code:

    bos | prefix content suffix after | prefix content suffix after | ... | eos | generation
                 ---------------- learned, if the role is

    [{"role": "user", "content": "Hi"}, ...]     as OpenAI and Hugging Face write messages
    [{"from": "human", "value": "Hi"}, ...]      as ShareGPT does

Special tokens are written as marks, characters that no message has: so the text ``<|im_end|>`` in a
message is never taken for the end of it.

Invariant: for messages without such characters, the text is what ``apply_chat_template`` of
``transformers`` renders with the template of that name (``TEMPLATES`` says which).
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from batchd.data.pipeline.step_files import StepFileInvalid, read_file
from batchd.data.samples.errors import SampleUndecodable
from batchd.runtime.plain import from_plain
from batchd.runtime.suggestions import suggestion
from batchd_wire.record import frozen

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
_OTHER_NAMES: Mapping[str, Role] = MappingProxyType({"human": "user", "gpt": "assistant", "observation": "tool"})
"""Of ShareGPT."""
_CALL = "function_call"
"""The role of ShareGPT's messages with the assistant's tool calls."""
TEMPLATE_BYTES_MAX = 1 << 20
TOKENS_MAX = 256
FIRST_MARK = 0x10F000
"""In Unicode's last plane, for private use; a message that has one of the 256 is a bad sample."""
_MARKS = re.compile(f"[{chr(FIRST_MARK)}-{chr(FIRST_MARK + TOKENS_MAX - 1)}]")
_PLACES = re.compile(r"\{(name|arguments|id)\}")
_TOOL_PLACES = re.compile(r"\{(tool|function)\}")


@frozen
class Calls:
    """How the tool calls of a message are written, instead of its content or behind it.

    ``call`` has ``{name}``, ``{arguments}`` and ``{id}``, which become JSON. ``prefix``: instead of
    that of the role. ``content``: whether the content is written, too, with ``between`` behind it.
    ``most``: the most calls of a message; 0 for any number.
    """

    call: str
    before: str = ""
    between: str = ""
    after: str = ""
    prefix: str | None = None
    content: bool = True
    most: int = 0


@frozen
class ToolsForm:
    """How the definitions of the tools of a chat are written.

    ``each`` has ``{tool}``, which becomes the definition in JSON, or ``{function}``, what is under
    this key in it, without "return"; ``indent``: its spaces, 0 for one line. ``into``: behind the
    words of the system, with ``join`` between them, or in a turn of their own; or in front of the
    first or the last message of the user. ``outside``: in front of its prefix, too. ``system``: in
    front of the system's words. ``tokens``: special tokens in these texts.
    """

    into: Literal["system", "first", "last"]
    before: str = ""
    each: str = "{tool}"
    between: str = ""
    after: str = ""
    join: str = ""
    system: str = ""
    indent: int = 0
    outside: bool = False
    tokens: tuple[str, ...] = ()


@frozen
class TurnForm:
    """How the messages of one role are written.

    ``prefix``, ``content`` and ``suffix``, where ``{id}`` is that of the tool call, and ``after``,
    which is not learned. ``next``: for messages of the role that follow each other, instead of
    ``after`` and ``prefix`` between them. ``trim``: without white space around the content.
    ``json``: the content as a text in JSON. ``into``: no turn of its own, but in front of the
    content of the first or the last message of the user, with ``after`` between them.
    """

    prefix: str = ""
    suffix: str = ""
    after: str = ""
    next: str | None = None
    trim: bool = False
    json: bool = False
    into: Literal["", "first", "last"] = ""
    calls: Calls | None = None


@frozen
class Template:
    """A template: see the module.

    ``tokens``: the special tokens in its texts. A role without a turn is refused. ``alternate``:
    user and assistant take turns, and the user begins. ``id_length``: that of the ids of tool
    calls; 0 for any.
    """

    tokens: tuple[str, ...]
    user: TurnForm
    assistant: TurnForm
    system: TurnForm | None = None
    tool: TurnForm | None = None
    tools: ToolsForm | None = None
    bos: str = ""
    eos: str = ""
    generation: str = ""
    alternate: bool = False
    id_length: int = 0

    @property
    def turns(self) -> Mapping[str, TurnForm]:
        """The turn of each role that it has."""
        found = {"system": self.system, "user": self.user, "assistant": self.assistant, "tool": self.tool}
        return {role: turn for role, turn in found.items() if turn is not None}


def _chatml() -> Template:
    def turn(role: str) -> TurnForm:
        return TurnForm(f"<|im_start|>{role}\n", "<|im_end|>", "\n")

    call = '<tool_call>\n{"name": {name}, "arguments": {arguments}}\n</tool_call>'
    return Template(
        ("<|im_start|>", "<|im_end|>"),
        turn("user"),
        replace(turn("assistant"), calls=Calls(call, between="\n")),
        turn("system"),
        TurnForm(
            "<|im_start|>user\n<tool_response>\n",
            "\n</tool_response>",
            "<|im_end|>\n",
            next="\n<tool_response>\n",
        ),
        ToolsForm(
            "system",
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
            "function signatures within <tools></tools> XML tags:\n<tools>\n",
            between="\n",
            after="\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
            '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
            "</tool_call>",
            join="\n\n",
        ),
        generation="<|im_start|>assistant\n",
    )


def _llama3() -> Template:
    def turn(role: str) -> TurnForm:
        return TurnForm(f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", trim=True)

    call = '{"name": {name}, "parameters": {arguments}}'
    return Template(
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        turn("user"),
        replace(turn("assistant"), calls=Calls(call, content=False, most=1)),
        turn("system"),
        replace(turn("ipython"), trim=False, json=True),
        ToolsForm(
            "first",
            "Given the following functions, please respond with a JSON for a function call with its proper arguments that "
            'best answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": dictionary of '
            "argument name and its value}.Do not use variables.\n\n",
            between="\n\n",
            after="\n\n",
            system="Environment: ipython\n",
            indent=4,
        ),
        bos="<|begin_of_text|>",
        generation="<|start_header_id|>assistant<|end_header_id|>\n\n",
    )


def _mistral() -> Template:
    call = '{"name": {name}, "arguments": {arguments}, "id": {id}}'
    calls = Calls(call, "[TOOL_CALLS] [", ", ", "]", prefix="", content=False)
    return Template(
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        TurnForm("[INST] ", "[/INST]"),
        TurnForm(" ", "</s>", trim=True, calls=calls),
        TurnForm(after="\n\n", into="first"),
        TurnForm('[TOOL_RESULTS] {"content": ', ', "call_id": {id}}[/TOOL_RESULTS]'),
        ToolsForm(
            "last",
            "[AVAILABLE_TOOLS] [",
            '{"type": "function", "function": {function}}',
            ", ",
            "][/AVAILABLE_TOOLS]",
            outside=True,
            tokens=("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        ),
        bos="<s>",
        alternate=True,
        id_length=9,
    )


def _gemma() -> Template:
    def turn(role: str) -> TurnForm:
        return TurnForm(f"<start_of_turn>{role}\n", "<end_of_turn>", "\n", trim=True)

    return Template(
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        turn("user"),
        turn("model"),
        TurnForm(after="\n\n", into="first"),
        bos="<bos>",
        generation="<start_of_turn>model\n",
        alternate=True,
    )


TEMPLATES: Mapping[str, Template] = MappingProxyType(
    {"chatml": _chatml(), "llama3": _llama3(), "mistral": _mistral(), "gemma": _gemma()}
)
"""By name. ``chatml``: ChatML, with tool calls as Qwen and Hermes write them, and no system message
where there is none. ``llama3``: of Llama 3, with the tools of 3.1. ``mistral``: of Mistral 7B
Instruct v0.3, the system message in the first message of the user. ``gemma``: of Gemma 3."""


def read_template(name: str | Path) -> Template:
    """A template by its name, or from a file in TOML or JSON. Raises ``StepFileInvalid``."""
    if isinstance(name, str):
        return TEMPLATES[name]
    content = read_file(name, TEMPLATE_BYTES_MAX)
    try:
        table = json.loads(content) if name.suffix == ".json" else tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise StepFileInvalid(f"{name} is no {'JSON' if name.suffix == '.json' else 'TOML'}: {error}") from None
    try:
        return _template_from(table)
    except (TypeError, ValueError) as error:
        raise StepFileInvalid(f"{name}: {error}") from None


def _template_from(table: Any) -> Template:
    """Raises ``TypeError`` or ``ValueError`` naming the key."""
    _check_keys("the template", Template, table)
    for role in ROLES:
        if role in table:
            _check_keys(role, TurnForm, table[role])
            if "calls" in table[role]:
                _check_keys(f"{role}.calls", Calls, table[role]["calls"])
    if "tools" in table:
        _check_keys("tools", ToolsForm, table["tools"])
    made: Template = from_plain(Template, table)
    if made.user.into or made.assistant.into or (made.tool is not None and made.tool.into):
        raise ValueError('only a message of the system may be "into" another')
    if made.tools is not None and made.tools.into == "system" and (made.system is None or made.system.into):
        raise ValueError('tools that are "into" the system need a turn of the system')
    if not all(made.tokens) or not 0 < len(set(made.tokens)) == len(made.tokens) <= TOKENS_MAX:
        raise ValueError(f"tokens must name 1 to {TOKENS_MAX} different special tokens of the tokenizer")
    return made


def _check_keys(what: str, kind: type, table: object) -> None:
    if not isinstance(table, dict):
        raise TypeError(f"{what} must be a table")
    known = [field.name for field in fields(kind)]
    unknown = next((key for key in table if key not in known), None)
    if unknown is not None:
        raise ValueError(f"{what} has no key {unknown!r}; {suggestion(unknown, known)}")
    needed = {Template: ("tokens", "user", "assistant"), Calls: ("call",), ToolsForm: ("into",)}.get(kind, ())
    missing = next((key for key in needed if key not in table), None)
    if missing is not None:
        raise ValueError(f"{what} needs the key {missing!r}")


# --- messages -------------------------------------------------------------------------------------


class ChatMessage(NamedTuple):
    """A message of a chat. ``calls``: name and arguments of each tool call, in JSON, and its id.

    ``place``: the message, in errors. ``may_learn``: False for one of weight 0, as OpenAI says it.
    """

    role: Role
    parts: tuple[str, ...]
    calls: tuple[Mapping[str, str], ...] = ()
    id: str = ""
    place: str = ""
    may_learn: bool = True


IMAGE = "<image>"
"""An image in the text of a message, as LLaVA's data has it."""
_IMAGE_TYPES = frozenset({"image", "image_url"})


_USUAL = "role", "content"
"""The keys of a message without any other."""


def messages_of(field: str, value: object, image: str = "") -> list[ChatMessage]:
    """The messages of a chat; ``image`` stands for an image, with marks for special tokens.

    Raises ``SampleUndecodable``, which names the one that is wrong.
    """
    if not isinstance(value, list) or not value:
        raise SampleUndecodable(f"{field} is {'an empty list' if value == [] else 'no list'}, and a chat has messages")
    return [_message(f"{field}[{number}]", turn, image) for number, turn in enumerate(value)]


def _message(place: str, turn: Any, image: str) -> ChatMessage:
    # most are: a third of the time
    if isinstance(turn, dict) and len(turn) == len(_USUAL) and not image:
        role, content = map(turn.get, _USUAL)
        if role in ROLES and isinstance(content, str) and (content.isascii() or not _MARKS.search(content)):
            return ChatMessage(role, (content,), place=place)
    if not isinstance(turn, dict):
        raise SampleUndecodable(f"{place} is {type(turn).__name__}, and a message is an object with role and content")
    said = turn.get("role", turn.get("from"))
    if said is None:
        raise SampleUndecodable(f'{place} has no "role", only {_listed(turn)}')
    if said == _CALL:
        said, calls_said = "gpt", _calls_said(place, turn.get("value"))
        turn = {"tool_calls": calls_said, "weight": turn.get("weight")}
    role = _OTHER_NAMES.get(said, said) if isinstance(said, str) else None
    if role not in ROLES:
        raise SampleUndecodable(f"{place} has the role {said!r}; a message is of {', '.join(ROLES)}")
    calls = tuple(_call(f"{place}.tool_calls[{number}]", one) for number, one in enumerate(_calls_in(place, turn)))
    if calls and role != "assistant":
        raise SampleUndecodable(f"{place} is of the role {role}, and has tool calls")
    name = "content" if "content" in turn else "value" if "value" in turn else ""
    content = turn[name] if name else None
    if content is None and not calls:
        raise SampleUndecodable(
            f"{place} has {'a content that is null' if name else 'no content, only ' + _listed(turn)}"
        )
    weight = turn.get("weight")
    if weight not in (None, 0, 1):
        raise SampleUndecodable(f"{place} has the weight {weight!r}, which is 0 or 1")
    parts, tool_call = tuple(_parts(f"{place}.{name}", content, image)), str(turn.get("tool_call_id") or "")
    return ChatMessage(role, parts, calls, tool_call, place, weight != 0)


def tools_of(field: str, value: object) -> Sequence[Mapping[str, object]]:
    """The definitions of a chat's tools. Raises ``SampleUndecodable``, which names the one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise SampleUndecodable(f"{field} is a text that is no JSON: {error}") from None
    if value is not None and not isinstance(value, list):
        raise SampleUndecodable(f"{field} is {type(value).__name__}, and tools are a list, or null")
    for number, tool in enumerate(value or []):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise SampleUndecodable(f"{field}[{number}] has no name of a function")
        if _MARKS.search(_in_json(tool)):
            raise SampleUndecodable(f"{field}[{number}] has a character that stands for a special token")
    return value or []


def _listed(turn: Mapping[str, object]) -> str:
    return ", ".join(map(repr, list(turn)[:8])) or "no keys"


def _parts(place: str, content: object, image: str) -> Iterator[str]:
    """The texts of a content: one, or those of a list of parts."""
    if content is None:
        return
    for number, part in enumerate(content) if isinstance(content, list) else [(None, content)]:
        text, where = part, place if number is None else f"{place}[{number}]"
        if isinstance(part, dict):
            if image and part.get("type") in _IMAGE_TYPES:
                yield image
                continue
            if part.get("type") != "text":
                raise SampleUndecodable(f'{where} is of type {part.get("type")!r}, and only "text" has tokens')
            text = part.get("text")
        if not isinstance(text, str):
            raise SampleUndecodable(f"{where} is {type(text).__name__}, not a text")
        if found := _MARKS.search(text):
            raise SampleUndecodable(f"{where} has the character U+{ord(found[0]):X}, which stands for a special token")
        yield text.replace(IMAGE, image) if image else text


def _calls_in(place: str, turn: Mapping[str, object]) -> Sequence[object]:
    calls = turn.get("tool_calls") or []
    if not isinstance(calls, list):
        raise SampleUndecodable(f"{place}.tool_calls is no list")
    return calls


def _calls_said(place: str, value: object) -> list[object]:
    """The calls that ShareGPT has in a message: one, or several, as JSON or as objects."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise SampleUndecodable(f"{place} is of {_CALL}, and a text that is no JSON: {error}") from None
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise SampleUndecodable(f"{place} is of {_CALL}, and has no call")
    return calls


def _call(place: str, call: Any) -> Mapping[str, str]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise SampleUndecodable(f"{place} has no name of a function")
    arguments = function.get("arguments", {})
    made = {
        "name": _in_json(function["name"]),
        "arguments": arguments if isinstance(arguments, str) else _in_json(arguments),
        "id": str(call.get("id") or ""),
    }
    if any(map(_MARKS.search, made.values())):
        raise SampleUndecodable(f"{place} has a character that stands for a special token")
    return made


def _in_json(value: object, indent: int = 0) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent or None)


# --- text -----------------------------------------------------------------------------------------


class Written(NamedTuple):
    """A chat as text, with marks for special tokens.

    ``learned``: (first, end) of the characters that are learned. ``exchanges``: the first character
    of each message of a user.
    """

    text: str
    learned: list[tuple[int, int]]
    exchanges: list[int]


class ChatWriter:
    """Writes chats by a template; ``learned``: the roles whose words are learned."""

    def __init__(self, name: str, template: Template, learned: Sequence[str], *, generation: bool) -> None:
        self._name = name
        self._template = template
        self._learned = frozenset(learned)
        tokens = (*template.tokens, *(template.tools.tokens if template.tools is not None else ()))
        self._marks = {token: chr(FIRST_MARK + number) for number, token in enumerate(tokens)}
        self._tokens = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
        self._turns = {role: self._marked(turn) for role, turn in template.turns.items()}
        self._bos, self._eos = self.with_marks(template.bos), self.with_marks(template.eos)
        self._generation = self.with_marks(template.generation) if generation else ""

    def write(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, object]] = ()) -> Written:
        """The text of a chat. Raises ``SampleUndecodable`` for one that the template refuses."""
        messages, before, behind, outside = self._with_tools(messages, tools)
        system, rest = self._checked(messages)
        text = [self._bos]
        size = len(self._bos)
        learned: list[tuple[int, int]] = []
        exchanges: list[int] = []
        for role, several in groupby(rest, key=lambda message: message.role):
            turn = self._turns[role]
            run = list(several)
            for number, message in enumerate(run):
                if role == "user":
                    exchanges.append(size)
                place = message.place
                in_front = before.get(place, "") + system.get(place, "")
                prefix, said = self._said(turn, message, in_front, behind.get(place, ""))
                if turn.next is not None and number > 0:
                    prefix = turn.next
                prefix = outside.get(place, "") + prefix
                start = size + len(prefix)
                after = "" if turn.next is not None and number < len(run) - 1 else turn.after
                pieces = (prefix, said, after)
                if role in self._learned and message.may_learn:
                    learned.append((start, start + len(said)))
                text += pieces
                size += sum(map(len, pieces))
        if self._eos and rest[-1].role in self._learned and rest[-1].may_learn:
            learned.append((size, size + len(self._eos)))
        return Written("".join([*text, self._eos, self._generation]), learned, exchanges)

    def _with_tools(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, object]]
    ) -> tuple[Sequence[ChatMessage], dict[str, str], dict[str, str], dict[str, str]]:
        """The messages, and texts of tools by places: before and behind words, and outside."""
        form = self._template.tools
        if form is None or not tools:
            return messages, {}, {}, {}
        written = self.with_marks(form.between).join(
            _TOOL_PLACES.sub(partial(_of_tool, tool, form.indent), self.with_marks(form.each)) for tool in tools
        )
        text = f"{self.with_marks(form.before)}{written}{self.with_marks(form.after)}"
        before: dict[str, str] = {}
        if form.system or form.into == "system":
            if messages[0].role != "system":
                messages = [ChatMessage("system", (), place="tools"), *messages]
            before[messages[0].place] = self.with_marks(form.system)
        if form.into == "system":
            return messages, before, {messages[0].place: (form.join if any(messages[0].parts) else "") + text}, {}
        users = [message.place for message in messages if message.role == "user"]
        if not users:
            raise SampleUndecodable(f"{messages[0].place} and the others are of no user, and tools go to one of these")
        place = users[0 if form.into == "first" else -1]
        return (messages, before, {}, {place: text}) if form.outside else (messages, before | {place: text}, {}, {})

    def _said(self, turn: TurnForm, message: ChatMessage, before: str, behind: str) -> tuple[str, str]:
        """The text in front of a message, and the one that is learned: content and suffix."""
        content = "".join([part.strip() for part in message.parts] if turn.trim else message.parts)
        if turn.json:
            content = _in_json(content)
        suffix = turn.suffix
        if "{" in suffix:
            suffix = _PLACES.sub(lambda _found: _in_json(message.id), suffix)
        calls = turn.calls if message.calls else None
        if calls is None:
            return turn.prefix, f"{before}{content}{behind}{suffix}"
        written = [_PLACES.sub(partial(_of_call, one), calls.call) for one in message.calls]
        if calls.content and content:
            written.insert(0, content)
        prefix = turn.prefix if calls.prefix is None else calls.prefix
        return prefix, f"{calls.before}{calls.between.join(written)}{calls.after}{suffix}"

    def _checked(self, messages: Sequence[ChatMessage]) -> tuple[dict[str, str], Sequence[ChatMessage]]:
        """The text of the system by the place of the message that it goes into, and the others."""
        for message in messages:
            self._check(message)
        turn, system = self._turns.get("system"), messages[0]
        if turn is None or not turn.into:
            self._check_order(messages)
            return {}, messages
        is_first = system.role == "system"
        rest = messages[is_first:]
        self._check_order(rest)
        if not is_first:
            return {}, rest
        users = [message for message in rest if message.role == "user"]
        if not users:
            raise SampleUndecodable(f"{system.place} is of the system, and no message of a user follows it")
        parts = "".join([part.strip() for part in system.parts] if turn.trim else system.parts)
        return {users[0 if turn.into == "first" else -1].place: f"{parts}{turn.after}"}, rest

    def _check(self, message: ChatMessage) -> None:
        place, role = message.place, message.role
        if role not in self._turns:
            raise SampleUndecodable(f'{place} is of the role {role}, which the template "{self._name}" has not')
        if not message.calls and role != "tool":
            return
        calls = self._turns[role].calls
        if message.calls and calls is None:
            raise SampleUndecodable(f'{place} has tool calls, which the template "{self._name}" has not')
        if calls is not None and 0 < calls.most < len(message.calls):
            raise SampleUndecodable(
                f'{place} has {len(message.calls)} tool calls, and "{self._name}" takes {calls.most}'
            )
        length = self._template.id_length
        ids = [call["id"] for call in message.calls] + ([message.id] if role == "tool" else [])
        if length and any(len(one) != length for one in ids):
            raise SampleUndecodable(f"{place} has the id of a tool call that is not {length} characters long")

    def _check_order(self, messages: Sequence[ChatMessage]) -> None:
        into = self._template.system is not None and self._template.system.into
        wanted = "user"
        for message in messages:
            if message.role == "system" and into:
                raise SampleUndecodable(f'{message.place} is of the system, which comes first in "{self._name}"')
            if not self._template.alternate or message.role in {"tool", "system"} or message.calls:
                continue
            if message.role != wanted:
                raise SampleUndecodable(
                    f'{message.place} is of the role {message.role}; in "{self._name}" user and assistant take turns, and '
                    f"the user begins"
                )
            wanted = "user" if wanted == "assistant" else "assistant"

    def with_marks(self, text: str) -> str:
        """A text with marks for the special tokens in it."""
        return self._tokens.sub(lambda found: self._marks[found[0]], text)

    def _marked(self, turn: TurnForm) -> TurnForm:
        calls = turn.calls
        if calls is not None:
            prefix = None if calls.prefix is None else self.with_marks(calls.prefix)
            call, before, between, after = map(self.with_marks, (calls.call, calls.before, calls.between, calls.after))
            calls = replace(calls, call=call, before=before, between=between, after=after, prefix=prefix)
        prefix, suffix, after = map(self.with_marks, (turn.prefix, turn.suffix, turn.after))
        next_one = None if turn.next is None else self.with_marks(turn.next)
        return replace(turn, prefix=prefix, suffix=suffix, after=after, next=next_one, calls=calls)


def _of_call(call: Mapping[str, str], found: re.Match[str]) -> str:
    return _in_json(call["id"]) if found[1] == "id" else call[found[1]]


def _of_tool(tool: Mapping[str, object], indent: int, found: re.Match[str]) -> str:
    function = tool.get("function", tool)
    assert isinstance(function, dict), "tools_of has looked"
    less = {key: value for key, value in function.items() if key != "return"}
    return _in_json(tool if found[1] == "tool" else less, indent)
