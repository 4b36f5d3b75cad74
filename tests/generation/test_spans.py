"""Which tokens of a rollout were sampled under which weights."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.types import spans_of


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(0, 5))
def test_spans_say_of_each_token_what_a_log_of_all_tokens_says(made, last):
    """`made[v]` tokens came under version v, then `last` under the next."""
    log = [version for version, count in enumerate([*made, last]) for _ in range(count)]
    updates = [(version, sum(made[: version + 1])) for version in range(len(made))]
    spans = spans_of(updates, len(made), len(log))
    assert spans == tuple((version, len(list(tokens))) for version, tokens in groupby(log))
