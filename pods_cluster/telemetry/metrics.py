"""The one registry of metrics: a name that is not in it is not a metric.

python -m pods_cluster.telemetry.metrics > docs/metrics.md
"""

from __future__ import annotations

from pods_cluster.telemetry.catalog import SECTIONS
from pods_cluster.telemetry.metric_registry import Kind, Metric, MetricValueError, Registry, UnknownMetric

__all__ = ["Kind", "Metric", "MetricValueError", "Registry", "UnknownMetric", "registry"]

registry = Registry(SECTIONS)
"""Every metric of the service. A plug-in adds its own with `registry.register(Metric(...), section=...)`."""


if __name__ == "__main__":
    print(registry.markdown(), end="")
