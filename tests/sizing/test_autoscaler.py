"""What a run asks of Ray's autoscaler, as the autoscaler reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

ASK = """
import json, sys
import ray
from pods_cluster.config import load_config
from pods_cluster.run.cluster import hint_autoscaler
from pods_cluster.client.demo import CONFIG
from pods_cluster.sizing.moves import Sizes
from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.experimental.internal_kv import _internal_kv_get

ray.init(address="local", num_cpus=1, resources=json.loads(sys.argv[1]), include_dashboard=False, log_to_driver=False)
config = load_config(CONFIG, ["data.eval=null", "run.eval.every=0", "generator.cpus_per_worker=2"])
for sizes in (Sizes(2, 1), None):
    hint_autoscaler(config, sizes)
    print(json.dumps(json.loads(_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL) or b"null")))
"""


def test_a_cluster_with_two_worker_groups_is_asked_for_both_and_one_without_for_nothing() -> None:
    """For two generators and one learner, and when that is over; both clusters start at once, as each takes a while."""
    asking = [
        subprocess.Popen(
            [sys.executable, "-c", ASK, json.dumps(resources)],
            env=os.environ | {"RAY_AUTH_MODE": "disabled"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for resources in ({"pods_generator": 1, "pods_learner": 1}, {})
    ]
    told = []
    for process in asking:
        out, errors = process.communicate(timeout=180)
        assert process.returncode == 0, errors
        told.append([json.loads(line) for line in out.splitlines()[-2:]])
    generator, learner = {"CPU": 2.0, "pods_generator": 1.0}, {"CPU": 1.0, "pods_learner": 1.0}
    assert told == [[[generator, generator, learner], []], [None, None]]
