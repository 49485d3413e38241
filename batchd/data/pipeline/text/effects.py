"""The effects of the steps on text, and checks of their files. Daemon, workers, ``batchd check``.

    text  --lowercase, remove_stopwords-->  text
          --tokenize-->    tokens: int32[n], tokens_mask: uint8[n], tokens_length: int32
          --lookup-->      vectors: float32[n, columns], vectors_length: int32
          --text_bytes-->  text: uint8[n]

    json  --chat-->        tokens: int32[?], loss_mask: uint8[?]

Standard library only: what reads a file is imported by its check.
"""

from dataclasses import replace

from batchd.data.pipeline.effects import Columns, NoSuchField, StepInvalid, column_of, described, effect, replaced
from batchd.data.pipeline.step_files import check_content
from batchd.data.pipeline.text.options import Chat, Lookup, Lowercase, RemoveStopwords, TextBytes, TextStep, Tokenize
from batchd.data.samples.columns import Column
from batchd.runtime.suggestions import pip_command


@effect.register
def _words(step: Lowercase | RemoveStopwords, columns: Columns) -> Columns:
    return {**columns, step.field: replace(_text(step, columns), made_by=step.op)}


@effect.register
def _tokenize(step: Tokenize, columns: Columns) -> Columns:
    _text(step, columns)
    if step.padding == "none":
        return replaced(step, columns, Column(step.to, dtype="int32", shape=(None,)))
    shape = (step.max_length,)
    tokens, mask, length = step.makes
    numbers, marks = Column(tokens, dtype="int32", shape=shape), Column(mask, dtype="uint8", shape=shape)
    return replaced(step, columns, numbers, marks, Column(length, dtype="int32"))


@effect.register
def _chat(step: Chat, columns: Columns) -> Columns:
    column = column_of(step, columns)
    if column.kind != "json":
        raise StepInvalid(
            f'"chat" needs messages, a field of type "json" in the source, and {column.name!r} is {described(column)}'
        )
    if step.tools:
        tools = columns.get(step.tools)
        if tools is None:
            raise NoSuchField(f'"chat" reads tools from {step.tools!r}', ("tools",), [step.tools], columns)
        if tools.kind != "json":
            raise StepInvalid(
                f'"chat" needs tools of type "json" in the source, and {tools.name!r} is {described(tools)}'
            )
        columns = {name: column for name, column in columns.items() if name != step.tools}
    tokens, mask = step.makes
    return replaced(
        step, columns, Column(tokens, dtype="int32", shape=(None,)), Column(mask, dtype="uint8", shape=(None,))
    )


@effect.register
def _lookup(step: Lookup, columns: Columns) -> Columns:
    """Read the number of columns from the header of the table."""
    from batchd.data.pipeline.text.files import table_shape  # noqa: PLC0415  needs numpy

    _text(step, columns)
    _rows, width, _offset = table_shape(step.table)
    vectors, length = step.makes
    rows = Column(vectors, dtype="float32", shape=(step.max_words, width))
    return replaced(step, columns, rows, Column(length, dtype="int32"))


@effect.register
def _text_bytes(step: TextBytes, columns: Columns) -> Columns:
    _text(step, columns)
    return replaced(step, columns, Column(step.field, dtype="uint8", shape=(step.length,)))


@check_content.register
def _check_files(step: Tokenize | RemoveStopwords | Lookup | Chat) -> None:
    from batchd.data.pipeline.text import files  # noqa: PLC0415  needs numpy

    try:
        match step:
            case Lookup():
                files.check_word_table(step.words, step.table)
            case RemoveStopwords():
                files.read_stop_words(step.file, lower=step.case == "ignore")
            case Tokenize():
                files.load_tokenizer(step)
            case Chat():
                files.ChatTokenizer(step)
    except ModuleNotFoundError as error:
        if error.name != "tokenizers":
            raise
        raise StepInvalid(
            f'"{step.op}" needs tokenizers, which is not installed: {pip_command("batchd[text]")}'
        ) from None


def _text(step: TextStep, columns: Columns) -> Column:
    column = column_of(step, columns)
    if column.kind != "text":
        by = f' after "{column.made_by}"' if column.made_by else ""
        pick = '; "pick" chooses one of them, or all' if column.kind == "texts" else ""
        raise StepInvalid(f'"{step.op}" needs text, and {column.name!r} is {described(column)}{by}{pick}')
    return column
