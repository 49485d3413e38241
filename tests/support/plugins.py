"""The example package with a kind of source, as if it were installed. For tests."""

import tomllib
import zipfile
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "zip_source"


def install(site: Path) -> Path:
    """Write the example, and the metadata that pip would write, into a folder of packages."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    about = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = project["entry-points"]["batchd.sources"]
    (about / "entry_points.txt").write_text(
        "[batchd.sources]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
    )
    (site / "batchd_zip.py").write_bytes((EXAMPLE / "batchd_zip.py").read_bytes())
    return site


def write_zip(file: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file
