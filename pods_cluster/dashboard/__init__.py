"""The dashboard: a page and a JSON API on the folders of runs.

It only reads what runs append to their folders; a run neither knows nor notices that it is watched. Changing a live run
goes through the `Controls` protocol, apart from everything else here. Only the command that starts it imports it.
"""


class DashboardError(Exception):
    """The dashboard cannot be started as asked; the text says why and what to do."""
