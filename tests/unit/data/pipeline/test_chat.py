"""The step ``chat``: equal to ``transformers``, and safe from what messages say."""

import json
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from batchd.config.load import read_config
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.options import step_from_plain, step_to_plain
from batchd.data.pipeline.sample_fields import sample_fields
from batchd.data.pipeline.shapes.options import Pack, PadBatch
from batchd.data.pipeline.step_files import StepFileInvalid, digests_of, named_by_content
from batchd.data.pipeline.text.chats import TEMPLATES, messages_of
from batchd.data.pipeline.text.files import ChatTokenizer
from batchd.data.pipeline.text.options import Chat
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from support.steps import check_steps

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "chats.json").read_text())
"""Chats with the tokens and masks of ``transformers``: for each template several with and without
system words, tool calls, an open end, empty contents and characters beyond ASCII. The templates are
those that models come with, with marks for generation around the words of the assistant."""
CASES = GOLDEN["cases"]
WITH_TOOLS = json.loads((Path(__file__).parents[3] / "golden" / "chat_tools.json").read_text())
"""Chats with definitions of tools as ``transformers`` writes them, by the templates of Qwen 2.5,
Llama 3.1 and Mistral 7B v0.3: without Qwen's own system words, without dates, and with the system's
words in the first message."""
CHAT = [Column("messages", "json")]
EXCHANGE = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "x"}]
SYSTEM = {"role": "system", "content": "..."}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer.json that the golden tokens are of: bytes, 48 merges, and special tokens."""
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    file.write_text(json.dumps(GOLDEN["tokenizer"]))
    return file


def made(tokenizer: Path, messages: Any, **options: Any) -> tuple[list[int], list[int]]:
    """Tokens and mask of a chat."""
    step = Chat(**{"tokenizer": tokenizer, "template": "chatml", "max_length": 4096, **options})
    values = Pipeline(CHAT, [step], 0, has_rows=False).make({"messages": messages}, 0, 0, 0)
    tokens, mask = values[step.to], values[step.mask]
    assert (tokens.dtype, mask.dtype, tokens.shape) == (np.int32, np.uint8, mask.shape)
    return tokens.tolist(), mask.tolist()


def text(tokenizer: Path, tokens: list[int]) -> str:
    return str(Tokenizer.from_file(str(tokenizer)).decode(tokens, skip_special_tokens=False))


def learned(tokenizer: Path, messages: Any, **options: Any) -> str:
    """The text that is learned."""
    tokens, mask = made(tokenizer, messages, **options)
    return text(tokenizer, [token for token, is_learned in zip(tokens, mask, strict=True) if is_learned])


def refused(tokenizer: Path, messages: Any, **options: Any) -> str:
    with pytest.raises(SampleUndecodable) as caught:
        made(tokenizer, messages, **options)
    return str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=[f"{case['template']}-{place}" for place, case in enumerate(CASES)])
def test_tokens_and_masks_are_those_of_transformers(case: dict[str, Any], tokenizer: Path) -> None:
    """Of every template, with an open end, too, and of ShareGPT's names for the same chat."""
    names = {"user": "human", "assistant": "gpt", "tool": "observation", "system": "system"}
    shared = [
        {"from": names[turn["role"]], "value": turn["content"]}
        | {key: value for key, value in turn.items() if key not in ("role", "content")}
        for turn in case["messages"]
    ]
    options = {"template": case["template"], "generation_prompt": case["generation_prompt"]}
    options |= {"special_text": case.get("special_text", "keep"), "loss": ("assistant",)}
    if "1" not in case["learned"]:
        options["loss"] = ()

    for messages in (case["messages"], shared):
        tokens, mask = made(tokenizer, messages, **options)
        assert tokens == case["ids"]
        assert "".join(map(str, mask)) == case["learned"]


def test_tool_calls_are_those_that_sharegpt_writes(tokenizer: Path) -> None:
    """A call, or several, as JSON in a text, of which LLaMA-Factory's data is, or as objects."""
    calls: list[Any] = [{"name": "add", "arguments": {"a": 2}}, {"name": "now", "arguments": {}}]
    start, end = {"role": "user", "content": "2+2?"}, {"role": "tool", "content": "4"}
    for several in (calls, calls[:1]):
        expected = made(tokenizer, [start, {"role": "assistant", "tool_calls": several}, end], template="chatml")
        for value in (
            several,
            json.dumps(several),
            *((several[0], json.dumps(several[0])) if len(several) == 1 else ()),
        ):
            shared = [{"from": "human", "value": "2+2?"}, {"from": "function_call", "value": value}]
            found = made(tokenizer, [*shared, {"from": "observation", "value": "4"}], template="chatml")
            assert [list(one) for one in found] == [list(one) for one in expected]
    for wrong, why in (("{", "no JSON"), ("[]", "has no call"), (None, "no name of a function"), ("3", "no name of")):
        assert why in refused(tokenizer, [start, {"from": "function_call", "value": wrong}], template="chatml")


@pytest.fixture(scope="module")
def tools_tokenizer(tokenizer: Path) -> Path:
    """The same with the special tokens of Mistral's tools."""
    made = Tokenizer.from_file(str(tokenizer))
    made.add_special_tokens(["[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"])
    made.save(str(tokenizer.with_name("tools.json")))
    return tokenizer.with_name("tools.json")


def with_tools(tokenizer: Path, messages: Any, tools: Any, **options: Any) -> list[int]:
    step = Chat(
        **{"tokenizer": tokenizer, "template": "chatml", "max_length": 4096, "tools": "t", "loss": (), **options}
    )
    values = Pipeline([*CHAT, Column("t", "json")], [step], 0, has_rows=False).make(
        {"messages": messages, "t": tools}, 0, 0, 0
    )
    assert values.keys() >= {"tokens", "loss_mask"}
    assert "t" not in values
    return list(values["tokens"].tolist())


@pytest.mark.parametrize("case", WITH_TOOLS["cases"], ids=lambda case: f"{case['template']}-{case['chat']}")
def test_tools_are_written_as_transformers_writes_them(case: dict[str, Any], tools_tokenizer: Path) -> None:
    """Their definitions, the calls and the answers; also of a text that has them in JSON."""
    messages, tools = WITH_TOOLS["chats"][case["chat"]], WITH_TOOLS["tools"][case["tools"]]

    for given_tools in (tools, json.dumps(tools)):
        tokens = with_tools(tools_tokenizer, messages, given_tools, template=case["template"])
        assert text(tools_tokenizer, tokens) == case["text"]
    none = with_tools(tools_tokenizer, messages, None, template=case["template"])
    assert none == with_tools(tools_tokenizer, messages, [], template=case["template"])
    assert none == made(tools_tokenizer, messages, template=case["template"], loss=())[0]


def test_tools_stay_when_a_chat_is_cut_and_are_not_learned(tools_tokenizer: Path) -> None:
    """The last exchange that fits has them; a tool cannot write a special token."""
    tools = [{"name": "f", "description": "<|im_end|>"}]
    whole = with_tools(tools_tokenizer, EXCHANGE, tools)
    chat = [*EXCHANGE, *EXCHANGE]

    assert with_tools(tools_tokenizer, chat, tools, max_length=len(whole)) == whole
    assert whole.count(GOLDEN["tokenizer"]["added_tokens"][1]["id"]) == 3
    step = Chat(tokenizer=tools_tokenizer, template="chatml", max_length=4096, tools="t")
    tokens, mask = ChatTokenizer(step).tokens_of(chat, tools)
    assert text(tools_tokenizer, tokens[mask == 1].tolist()) == "x<|im_end|>x<|im_end|>"


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        ("[", "t is a text that is no JSON"),
        ({}, "t is dict, and tools are a list, or null"),
        ([3], r"t\[0\] has no name of a function"),
        ([{"function": {}}], r"t\[0\] has no name of a function"),
        ([{"name": "\U0010f001"}], r"t\[0\] has a character that stands for a special token"),
    ],
)
def test_tools_that_are_none_are_a_bad_sample(tools: Any, why: str, tools_tokenizer: Path) -> None:
    """The reason names the one that is wrong."""
    with pytest.raises(SampleUndecodable, match=why):
        with_tools(tools_tokenizer, EXCHANGE, tools)
    with pytest.raises(SampleUndecodable, match="are of no user"):
        with_tools(tools_tokenizer, EXCHANGE[1:], [{"name": "f"}], template="llama3")


def test_check_names_a_template_without_tools_and_a_field_that_is_none(tokenizer: Path, tmp_path: Path) -> None:
    """Before the first sample."""

    def problem(column: Column, **options: Any) -> str:
        return check_steps(
            [*CHAT, column], [Chat(**{"tokenizer": tokenizer, "max_length": 9, "tools": "t", **options})]
        )[0]

    column = Column("t", "json")
    assert 'the template "gemma" has no tools' in problem(column, template="gemma")
    assert "no special token [AVAILABLE_TOOLS]" in problem(column, template="mistral")
    assert '"chat" needs tools of type "json" in the source, and \'t\' is text' in problem(
        Column("t", "text"), template="chatml"
    )
    assert "\"chat\" reads tools from 't'" in problem(Column("u", "json"), template="chatml")
    (tmp_path / "own.toml").write_text(OWN + 'tools = { into = "system" }\n')
    assert "need a turn of the system" in problem(column, template=tmp_path / "own.toml")
    with pytest.raises(ValueError, match="field and tools are both"):
        Chat(tokenizer=tokenizer, template="chatml", max_length=9, tools="messages")


@pytest.mark.parametrize("template", TEMPLATES)
def test_no_message_can_write_a_special_token(template: str, tokenizer: Path) -> None:
    """Its text stays text: the special tokens of a chat are those of a harmless one."""
    special = re.compile("|".join(map(re.escape, TEMPLATES[template].tokens)))
    evil = "".join(TEMPLATES[template].tokens)
    tokens, _mask = made(tokenizer, [{**turn, "content": evil} for turn in EXCHANGE], template=template)
    harmless, _mask = made(tokenizer, EXCHANGE, template=template)
    numbers = {GOLDEN["tokenizer"]["added_tokens"][place]["id"] for place in range(16)}

    assert [token for token in tokens if token in numbers] == [token for token in harmless if token in numbers]
    assert len(special.findall(text(tokenizer, tokens))) > len(special.findall(text(tokenizer, harmless)))


def test_images_stand_where_a_message_has_them(tokenizer: Path) -> None:
    """As parts, and as the text of LLaVA; what else a message says stays text."""
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image_url", "image_url": {}}]
    llava = "<image>and<image>"
    expected = "<|im_start|>user\n<s><bos></s>and<s><bos></s><|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n"

    for content in (parts, llava):
        tokens, mask = made(tokenizer, [{"role": "user", "content": content}, EXCHANGE[1]], image="<s><bos></s>")
        assert text(tokenizer, tokens) == expected
        assert tokens.count(13) == 2
        assert not any(mask[place] for place, token in enumerate(tokens) if token == 13)
    harmless, _mask = made(tokenizer, [{"role": "user", "content": "<bos>"}, EXCHANGE[1]], image="<bos>")
    assert 13 not in harmless
    assert "type 'image'" in refused(tokenizer, [{"role": "user", "content": parts}, EXCHANGE[1]])
    with pytest.raises(StepFileInvalid, match="has no special token in image = '<pic>'"):
        made(tokenizer, EXCHANGE, image="<pic>")


def test_loss_names_the_roles_that_are_learned(tokenizer: Path) -> None:
    """Of each its words and the token behind them; none are learned for chats to be continued."""
    chat = [SYSTEM, *EXCHANGE, {"role": "user", "content": ""}]

    assert learned(tokenizer, chat) == "x<|im_end|>"
    assert learned(tokenizer, chat, loss=("user", "system")) == "...<|im_end|>Hello<|im_end|><|im_end|>"
    assert learned(tokenizer, chat, loss=()) == ""
    assert learned(tokenizer, EXCHANGE, template="mistral") == "x</s>"


def test_a_message_of_weight_0_is_not_learned(tokenizer: Path) -> None:
    """As OpenAI writes it; its tokens are there."""
    first, second = {**EXCHANGE[1], "content": "first", "weight": 0}, {**EXCHANGE[1], "weight": 1}
    chat = [EXCHANGE[0], first, EXCHANGE[0], second]

    assert learned(tokenizer, chat) == "x<|im_end|>"
    assert made(tokenizer, chat)[0] == made(tokenizer, [{**turn, "weight": None} for turn in chat])[0]
    assert refused(tokenizer, [{**second, "weight": 0.5}]) == "messages[0] has the weight 0.5, which is 0 or 1"
    assert "no token to learn" in refused(tokenizer, chat[:2])


def test_a_content_of_several_texts_is_one(tokenizer: Path) -> None:
    """As OpenAI writes it."""
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]

    assert made(tokenizer, [{"role": "user", "content": parts}, EXCHANGE[1]]) == made(tokenizer, EXCHANGE)


def test_a_long_chat_keeps_the_system_and_its_last_whole_exchanges(tokenizer: Path) -> None:
    """As many as fit; what is left is the chat without the others."""
    rest = [{**turn, "content": f"{place}"} for place, turn in enumerate(EXCHANGE * 5)]
    whole = len(made(tokenizer, [SYSTEM, *rest])[0])
    for template in ("chatml", "mistral"):
        for count in range(1, 5):
            kept = made(tokenizer, [SYSTEM, *rest[-2 * count :]], template=template)
            more = made(tokenizer, [SYSTEM, *rest[-2 * count - 2 :]], template=template)
            for length in (len(kept[0]), len(more[0]) - 1):
                assert made(tokenizer, [SYSTEM, *rest], template=template, max_length=length) == kept
    shortest = len(made(tokenizer, [SYSTEM, *rest[-2:]])[0])

    assert refused(tokenizer, [SYSTEM, *rest], max_length=shortest - 1) == (
        f"the last exchange of the chat alone is longer than max_length = {shortest - 1}"
    )
    assert refused(tokenizer, [SYSTEM, *rest], max_length=whole - 1, truncate="bad") == (
        f"the chat has {whole} tokens, more than max_length = {whole - 1}"
    )


def test_tokens_can_be_cut_off_at_either_side(tokenizer: Path) -> None:
    """Tokens and mask together; a chat of which nothing learned is left is bad."""
    tokens, mask = made(tokenizer, EXCHANGE)

    assert made(tokenizer, EXCHANGE, max_length=4, truncate="left") == (tokens[-4:], mask[-4:])
    assert made(tokenizer, EXCHANGE, max_length=len(tokens) - 2, truncate="right") == (tokens[:-2], mask[:-2])
    assert "no token to learn" in refused(tokenizer, EXCHANGE, max_length=4, truncate="right")


@pytest.mark.parametrize(
    ("messages", "template", "why"),
    [
        ([], "chatml", "messages is an empty list"),
        ("hi", "chatml", "messages is no list"),
        (["hi"], "chatml", r"messages\[0\] is str, and a message is an object"),
        ([{"content": "hi"}], "chatml", r"messages\[0\] has no \"role\", only 'content'"),
        ([EXCHANGE[0], {"role": "critic", "content": ""}], "chatml", r"messages\[1\] has the role 'critic'"),
        ([EXCHANGE[0], {"role": ["user"], "content": ""}], "chatml", r"messages\[1\] has the role \['user'\]"),
        ([{"role": "user", "text": "hi"}], "chatml", r"messages\[0\] has no content, only 'role', 'text'"),
        ([{"role": "user", "content": None}], "chatml", r"messages\[0\] has a content that is null"),
        ([{"role": "user", "content": 3}], "chatml", r"messages\[0\].content is int, not a text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "chatml", r"content\[0\] is of type 'image'"),
        ([{"role": "user", "content": "\U0010f001"}], "chatml", r"has the character U\+10F001"),
        ([{"role": "user", "content": "\ud800"}, EXCHANGE[1]], "chatml", "does not take the chat"),
        ([{"role": "user", "content": "", "tool_calls": [{}]}], "chatml", r"tool_calls\[0\] has no name"),
        ([EXCHANGE[0]], "chatml", "no token to learn: no words of assistant"),
        (EXCHANGE[::-1], "mistral", r"messages\[0\] is of the role assistant; .* take turns"),
        ([*EXCHANGE, EXCHANGE[1]], "gemma", r"messages\[2\] is of the role assistant; .* take turns"),
        ([*EXCHANGE, SYSTEM], "mistral", r"messages\[2\] is of the system, which comes first in \"mistral\""),
        ([SYSTEM], "gemma", r"messages\[0\] is of the system, and no message of a user follows it"),
        (
            [EXCHANGE[0], {"role": "tool", "content": ""}],
            "gemma",
            r"messages\[1\] is of the role tool, which .* has not",
        ),
        ([EXCHANGE[0], {"role": "tool", "content": ""}], "mistral", "id of a tool call that is not 9 characters"),
        (
            [EXCHANGE[0], {"role": "assistant", "tool_calls": [{"name": "f"}, {"name": "f"}]}],
            "llama3",
            r"messages\[1\] has 2 tool calls, and \"llama3\" takes 1",
        ),
        (
            [EXCHANGE[0], {"role": "assistant", "tool_calls": [{"name": "f"}]}],
            "gemma",
            r"messages\[1\] has tool calls, which the template \"gemma\" has not",
        ),
    ],
)
def test_a_chat_that_cannot_be_written_is_a_bad_sample(messages: Any, template: str, why: str, tokenizer: Path) -> None:
    """The reason names the message."""
    assert re.search(why, refused(tokenizer, messages, template=template))


LEAVES = st.none() | st.booleans() | st.integers() | st.text(st.characters(), max_size=4)
ANYTHING = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
CALLS = st.fixed_dictionaries(
    {}, optional={"function": ANYTHING, "name": ANYTHING, "arguments": ANYTHING, "id": ANYTHING}
)
TURNS = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]) | ANYTHING},
    optional={
        "content": st.text(st.characters()) | ANYTHING,
        "tool_calls": st.lists(CALLS, max_size=2) | ANYTHING,
        "tool_call_id": st.just("123456789") | ANYTHING,
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TURNS | ANYTHING, max_size=5) | ANYTHING, st.sampled_from(sorted(TEMPLATES)))
def test_whatever_json_says_is_a_chat_or_a_bad_sample(tokenizer: Path, messages: Any, template: str) -> None:
    """No other error, whatever is under a key; a good chat has a mask of its length."""
    with suppress(SampleUndecodable):
        tokens, mask = _tokenizer(tokenizer, template).tokens_of(messages)
        assert len(tokens) == len(mask) <= 64


@cache
def _tokenizer(file: Path, template: Any) -> ChatTokenizer:
    return ChatTokenizer(Chat(tokenizer=file, template=template, loss=(), max_length=64, truncate="left"))


OWN = """
tokens = ["<s>", "</s>", "[INST]", "[/INST]"]
bos = "<s>"
eos = "</s>"
alternate = true
user = { prefix = "[INST] ", suffix = " [/INST]" }
assistant = { prefix = " ", trim = true }
system = { into = "last", after = "\\n" }
"""


def test_a_template_of_ones_own_is_a_table(tokenizer: Path, tmp_path: Path) -> None:
    """In TOML or JSON: system words in the last message of the user, one end behind all."""
    chat = [SYSTEM, *EXCHANGE, *EXCHANGE]
    (tmp_path / "own.toml").write_text(OWN)
    turn = {"prefix": "<start_of_turn>", "after": "<end_of_turn>"}
    table = {"tokens": ["<start_of_turn>", "<end_of_turn>"], "user": turn, "assistant": turn}
    (tmp_path / "own.json").write_text(json.dumps(table))

    tokens, _mask = made(tokenizer, chat, template=tmp_path / "own.toml")

    assert text(tokenizer, tokens) == "<s>[INST] Hello [/INST] x[INST] ...\nHello [/INST] x</s>"
    assert learned(tokenizer, chat, template=tmp_path / "own.toml") == "xx</s>"
    assert learned(tokenizer, EXCHANGE, template=tmp_path / "own.json") == "x"
    assert 'is of the role system, which the template "own.json" has not' in refused(
        tokenizer, chat, template=tmp_path / "own.json"
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"bos": "user ="}, "own.toml is no TOML"),
        ({"bos = ": "boss = "}, "the template has no key 'boss'; did you mean bos?"),
        ({"prefix": "prefx"}, "user has no key 'prefx'; did you mean prefix?"),
        ({"tokens": "# "}, "the template needs the key 'tokens'"),
        ({"alternate = true": "alternate = 1"}, "1 is not <class 'bool'>"),
        ({'into = "last"': 'into = "middle"'}, "middle"),
        ({'"[/INST]"]': '"[/INSTR]"]'}, r'has no special token \[/INSTR\], which the template "own.toml" writes'),
    ],
)
def test_a_template_that_makes_no_sense_is_refused(
    change: dict[str, str], why: str | None, tokenizer: Path, tmp_path: Path
) -> None:
    """By check, with the key, the file and the token that the tokenizer lacks."""
    content = OWN
    for old, new in change.items():
        content = content.replace(old, new, 1)
    (tmp_path / "own.toml").write_text(content)
    steps = [
        Chat(tokenizer=tokenizer, template=tmp_path / "own.toml", max_length=9),
        PadBatch(field="tokens", max_shape=(9,)),
        PadBatch(field="loss_mask", max_shape=(9,)),
    ]

    problems = check_steps(CHAT, steps)

    assert len(problems) == (why is not None)
    assert why is None or re.search(why, problems[0]), problems


def test_tokenizer_and_template_are_in_the_fingerprint_by_their_content(tokenizer: Path, tmp_path: Path) -> None:
    """Lengths depend on them; a path does not matter. A step survives the way to a worker."""
    (tmp_path / "own.toml").write_text(OWN)
    own = Chat(tokenizer=tokenizer, template=tmp_path / "own.toml", max_length=9)
    named = Chat(tokenizer=tokenizer, template="gemma", max_length=9)

    for step in (own, named):
        assert step_from_plain(json.loads(json.dumps(step_to_plain(step)))) == step
    assert named_by_content(named, digests_of([named]))["template"] == "gemma"
    before = named_by_content(own, digests_of([own]))
    assert str(tmp_path) not in str(before)
    (tmp_path / "own.toml").write_text(OWN + "# another")
    assert named_by_content(own, digests_of([own])) != before


def test_a_template_is_a_name_or_a_path_relative_to_the_configuration(tokenizer: Path, tmp_path: Path) -> None:
    """A name is no path, whatever files there are."""
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (tmp_path / "own.toml").write_text(OWN)
    (tmp_path / "chatml").write_text(OWN)
    for template, read in {"own.toml": tmp_path / "own.toml", "chatml": "chatml"}.items():
        chat = f'{{ op = "chat", tokenizer = "tokenizer.json", template = "{template}", max_length = 9 }}'
        source = '{ type = "jsonl", root = ".", shards = ["a"], fields = { messages = "json" } }'
        (tmp_path / "batchd.toml").write_text(f"[streams.s]\nbatch_size = 1\nsource = {source}\npipeline = [{chat}]\n")

        config = read_config(tmp_path / "batchd.toml", environment={}).config

        assert config is not None
        (step,) = config.streams["s"].pipeline
        assert isinstance(step, Chat)
        assert (step.template, step.tokenizer) == (read, tmp_path / "tokenizer.json")


def test_preference_pairs_are_two_chats_under_names_of_their_own(tokenizer: Path) -> None:
    """Both fields of a pair are packed or padded, each with its mask."""
    columns = [Column("chosen", "json"), Column("rejected", "json")]
    steps: list[Any] = []
    for name in ("chosen", "rejected"):
        steps.append(
            Chat(field=name, to=name, mask=f"{name}_mask", tokenizer=tokenizer, template="chatml", max_length=40)
        )
        steps += [PadBatch(field=field, max_shape=(40,)) for field in (name, f"{name}_mask")]

    fields = sample_fields(columns, steps, "fail")

    assert check_steps(columns, steps) == []
    assert [field.name for field in fields if not field.name.endswith("_length")] == [
        "chosen",
        "chosen_mask",
        "rejected",
        "rejected_mask",
        "index",
    ]


def test_the_mask_is_packed_beside_the_tokens(tokenizer: Path) -> None:
    """A row of `pack` has both, in the same places."""
    steps = [
        Chat(tokenizer=tokenizer, template="chatml", max_length=64),
        Pack(field="tokens", length=128, documents=4),
    ]

    fields = {field.name: (field.dtype, field.shape) for field in sample_fields(CHAT, steps, "skip")}

    assert check_steps(CHAT, steps) == []
    assert (fields["tokens"], fields["loss_mask"]) == (("int32", (128,)), ("uint8", (128,)))


@pytest.mark.parametrize(
    ("column", "why"),
    [
        (
            Column("messages", "text"),
            '"chat" needs messages, a field of type "json" in the source, and \'messages\' is text',
        ),
        (Column("messages", "json"), "a batch cannot hold 'tokens' .int32"),
    ],
)
def test_check_says_what_to_do_about_messages(column: Column, why: str, tokenizer: Path) -> None:
    """Before the step, and behind it."""
    problems = check_steps([column], [Chat(tokenizer=tokenizer, template="chatml", max_length=9)])

    assert re.match(why, problems[0])


def test_tool_calls_may_have_their_arguments_as_text() -> None:
    """OpenAI writes them so; they stay as they are."""
    call = {"function": {"name": "f", "arguments": '{"a":1}'}, "id": "7"}

    (message,) = messages_of("m", [{"role": "assistant", "tool_calls": [call]}])

    assert message.calls == ({"name": '"f"', "arguments": '{"a":1}', "id": "7"},)
