"""The telemetry of a run: one registry of metrics, the run folder, sinks, the live display and the summary.

Nothing here may stop training: at run time a failure to write is counted and told once, never raised.
"""
