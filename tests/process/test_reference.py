"""The programs of the API reference without a framework; `tests/with_*` run the others."""

import pytest

from support.reference import programs, run_programs
from support.settings import folder_stream, write_settings

FRAMEWORKS = {"PyTorch", "Lightning", "JAX", "TensorFlow", "Keras"}
CAMERA = {"type": "push", "fields": {"image": "uint8[48,64,3]", "label": "int64"}}


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve a stream of photographs, and one of live frames."""
    live = {"source": CAMERA, "batch_size": 4, "memory": "4MiB"}
    return start_shared_daemon({"photos": folder_stream(photos), "camera": live})


@pytest.mark.parametrize("section", [one for one in programs() if one not in FRAMEWORKS])
def test_a_program_of_the_reference_runs(section, daemon, photos, daemons_folder, tmp_path, monkeypatch, capsys):
    """It reads from a daemon, or from one of its own, and prints only what it says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHD_ADDRESS", daemon.address)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(daemons_folder))
    write_settings(tmp_path / "batchd.toml", {"photos": folder_stream(photos)}, {"workers": 1, "memory": "16MiB"})

    run_programs(section)

    printed = capsys.readouterr().out
    assert ("camera, photos" in printed) == (section == "Exceptions"), printed
