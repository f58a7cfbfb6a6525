"""What a probe found, in the text format of Prometheus, for the node exporter's textfile collector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from collapse.probe import Probe, Status

HELP: Mapping[str, str] = {
    "collapse_probe_success": "Whether the probe could look at the files (1) or not (0).",
    "collapse_site_erased": "Whether no file holds weights of the site (1) or some does (0).",
    "collapse_site_status": "1 for the status that the site has, 0 for the others.",
    "collapse_site_alive_tensors": "Tensors of the site that hold anything but zeros.",
}


def to_prometheus(found: Probe | None, *, model: str, site: str) -> str:
    """Return the metrics of one probe; None stands for one that could not be made.

    `model` is the name of the directory, `site` the pattern; both are labels of every sample. All metrics are gauges.
    """
    labels = {"model": model, "site": site}
    samples: dict[str, list[str]] = {"collapse_probe_success": [_sample({**labels}, found is not None)]}
    if found is not None:
        samples["collapse_site_erased"] = [_sample(labels, found.status == "ERASED")]
        samples["collapse_site_status"] = [
            _sample({**labels, "status": status}, status == found.status) for status in get_args(Status)
        ]
        samples["collapse_site_alive_tensors"] = [_sample(labels, len(found.alive))]
    lines = []
    for name, values in samples.items():
        lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} gauge", *(f"{name}{value}" for value in values)]
    return "\n".join(lines) + "\n"


def _sample(labels: Mapping[str, str], value: int) -> str:
    listed = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
    return f"{{{listed}}} {int(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
