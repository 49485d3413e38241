"""Render the plain manifests of ``deploy/kubernetes`` from the chart; `make manifests` runs this.

    render.py FOLDER        FOLDER/daemon.yaml, FOLDER/workers/workers.yaml, ...

Each is what `helm template batchd deploy/helm/batchd` prints, by the engine of Helm itself. The
manifests of worker hosts are apart, because they are optional.
"""

import sys
from pathlib import Path

from helm_python import Chart

CHART = Path(__file__).parent / "batchd"
NOTICE = "# Rendered from deploy/helm/batchd by `make manifests`. Edit a copy, or use the chart.\n"
VALUES = {
    "": {},
    "workers": {"workers": {"enabled": True, "scaling": {"enabled": True}}},
}
"""The values for each folder. A manifest is in the first one for which the chart renders it."""


def main() -> None:
    """Write the manifests."""
    folder, written = Path(sys.argv[1]), set()
    with Chart.load(CHART) as chart:
        for place, values in VALUES.items():
            (folder / place).mkdir(parents=True, exist_ok=True)
            for template, text in chart.render(values, name="batchd").items():
                name = Path(template).name
                if name.endswith(".yaml") and text.strip() and name not in written:
                    written.add(name)
                    lines = [line.rstrip() for line in text.strip().splitlines()]
                    (folder / place / name).write_text(NOTICE + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
