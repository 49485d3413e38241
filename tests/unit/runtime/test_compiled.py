"""Extensions that were compiled from other sources than those beside them are refused."""

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

from batchd.cli.main import main
from batchd.config.load import load_config
from batchd.errors import BatchdError, ExitCode
from batchd.runtime import compiled
from batchd.runtime.compiled import EXTENSIONS, outdated_extension, sources_digest


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget what was found of the extensions before and afterwards: a process looks once."""
    outdated_extension.cache_clear()
    yield
    outdated_extension.cache_clear()


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only extension, with the digest of its source and its header somewhere in it."""
    for name in ("_pixels.c", "_pixels.h"):
        (tmp_path / name).write_text(f"of {name}")
    file = tmp_path / "_pixels.abi3.so"
    file.write_bytes(b"\x7fELF" + bytes.fromhex(sources_digest(tmp_path, "_pixels")) + b"\0code")
    spec = ModuleSpec("batchd.data.pipeline._pixels", None, origin=str(file))
    monkeypatch.setattr(compiled, "find_spec", {"batchd.data.pipeline._pixels": spec}.get)
    return file


def test_the_extensions_of_this_installation_belong_to_its_sources() -> None:
    """`setup.py` compiled the digests into them; `make venv` mends a failure of this test."""
    assert outdated_extension() == ""
    built = [Path(spec.origin) for spec in map(find_spec, EXTENSIONS) if spec is not None and spec.origin is not None]
    for file in built:
        digest = sources_digest(file.parent, file.name.partition(".")[0])
        assert bytes.fromhex(digest) in file.read_bytes()


@pytest.mark.parametrize("change", ["_pixels.c", "_pixels.h", "_pixels_more.c"])
def test_a_change_of_any_source_makes_an_extension_outdated(extension: Path, change: str) -> None:
    """The message has the file, the command that compiles it, and what helps without a compiler."""
    (extension.parent / change).write_text("of something else")

    problem = outdated_extension()

    assert problem.startswith(f"{extension} was compiled from other sources than those beside it")
    _, _, folder = problem.partition(f"{sys.executable} -m pip install --editable ")
    assert Path(folder.partition(";")[0], "pyproject.toml").exists()
    assert "or remove the file" in problem


def test_an_extension_of_before_the_digests_is_outdated(extension: Path) -> None:
    """It has no digest at all."""
    extension.write_bytes(b"\x7fELF")

    assert outdated_extension().startswith(str(extension))


@pytest.mark.parametrize("kept", ["the extension", "its sources"])
def test_an_installation_without_one_of_the_two_is_not_outdated(extension: Path, kept: str) -> None:
    """A wheel has no sources, and without a compiler there is no extension."""
    if kept == "its sources":
        compiled.find_spec = lambda _name: None  # type: ignore[attr-defined]  the fixture restores it
    else:
        extension.write_bytes(b"\x7fELF")
        for source in extension.parent.glob("*.[ch]"):
            source.unlink()

    assert outdated_extension() == ""


@pytest.mark.parametrize("command", ["check", "worker"])
def test_commands_refuse_to_start(
    extension: Path, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They stop before they do anything, and so does all that reads a configuration, as `serve`."""
    extension.write_bytes(b"\x7fELF")
    config = tmp_path / "batchd.toml"
    config.write_text('[daemon]\nruntime_dir = "run"\n')
    arguments = {"check": [str(config)], "worker": ["tcp://127.0.0.1:1"]}[command]

    with pytest.raises(BatchdError, match="was compiled from other sources"):
        load_config(config)
    with pytest.raises(SystemExit) as ended:
        main([command, *arguments])

    assert ended.value.code == ExitCode.FAILED
    assert "was compiled from other sources" in capsys.readouterr().err
