"""The test modules that take more than a moment, and which of them stay together.

`make check` leaves them out (`pytest --pure`): they start Ray, vLLM, DeepSpeed, a browser or processes of their own, or
compute for seconds. All other modules are pure, and no one of them may start to import what is named in `HEAVY_IMPORTS`.
Two processes share the whole suite: a unit is what one of them runs without a break, because its modules share something
that is slow to make. The longest come first, so that both processes end at about the same time.
"""

from __future__ import annotations

# Not DeepSpeed: transformers imports it whenever a model is saved.
HEAVY_IMPORTS = ("vllm", "playwright")

UNITS: tuple[tuple[str, ...], ...] = (
    ("client/test_recovery.py",),
    # one engine in this process for each model
    (
        "generation/engines/vllm/test_engine.py",
        "generation/engines/vllm/test_compat.py",
        "generation/engines/vllm/test_adapter.py",
        "generation/engines/vllm/test_direct_load.py",
        "generation/engines/vllm/test_direct_adapter.py",
        "generation/engines/vllm/test_scheduler.py",
    ),
    ("run/test_honesty.py",),
    ("client/test_command.py",),
    ("client/test_failing_rewards.py",),
    (
        "client/test_driver.py",
        "client/test_quickstart.py",
        "api/test_train.py",
        "examples/test_examples.py",
        "environments/test_calculator.py",
    ),
    ("run/test_leftovers.py",),
    ("run/test_nodes.py",),
    ("client/test_sweep.py", "client/test_lanes.py"),
    ("learning/test_learner_group.py",),
    ("generation/test_pool.py", "generation/test_pool_failures.py", "generation/test_place.py"),
    # a process group of one rank in this process, and one pair of ranks beside it
    (
        "learning/test_resharding.py",
        "learning/test_forward.py",
        "learning/test_kernel_choice.py",
        "learning/test_two_ranks.py",
        "learning/test_skipping.py",
        "learning/test_trainer.py",
        "learning/test_export.py",
    ),
    ("client/test_interrupted_step.py",),
    ("run/test_agreement.py",),
    ("generation/engines/vllm/test_tensor_parallel.py",),
    ("generation/engines/vllm/test_process.py",),
    # one set of ranks and workers
    ("weights/test_broadcaster.py", "weights/test_relay.py"),
    ("client/test_jobs.py",),
    ("sizing/test_live_scaling.py",),
    ("run/test_settled_run.py",),
    # one browser
    ("dashboard/test_page.py", "dashboard/test_scaling_page.py"),
    (
        "scoring/test_scorer_pool.py",
        "scoring/test_scorer_processes.py",
        "scoring/test_scorer_limits.py",
        "scoring/test_reward_probe.py",
    ),
    ("sizing/test_autoscaler.py",),
    # workers with environments; processes of environments
    ("generation/test_turns.py", "environments/test_host.py", "environments/test_description.py"),
    ("generation/engines/builtin/test_engine.py", "generation/engines/builtin/test_architectures.py"),
    ("selection/test_actor.py", "test_stopped_process.py", "learning/test_fetch_rollouts.py"),
    ("weights/test_transfer.py",),
    ("config/test_shipped.py",),
    ("analysis/test_result_files.py",),
    ("generation/engines/builtin/test_merge_adapter.py",),
    ("dashboard/test_live.py",),
    ("scoring/test_gold_of_datasets.py",),
    ("generation/engines/builtin/test_weights.py",),
    ("telemetry/test_recorder.py",),
    ("telemetry/test_tracker_sinks.py",),
    ("analysis/test_gsm8k.py",),
    ("analysis/test_evidence.py",),
    ("analysis/test_peers.py",),
    ("analysis/test_peers_server.py",),
    ("telemetry/test_curves.py",),
    ("dashboard/test_fuzz.py",),
    ("client/test_imports.py",),
    ("client/test_wrong_inputs.py", "client/test_mutated_files.py"),
    ("deploy/test_slurm.py", "deploy/test_kustomize.py", "deploy/test_helm.py"),
    ("run/test_unwatched.py",),
    ("run/test_laws.py",),
    ("docs/test_wheel.py",),
    ("test_warm_workers.py",),
)
UNIT_OF = {f"tests/{module}": place for place, unit in enumerate(UNITS) for module in unit}

# `make check` has two processes as well, and each imports only what its own tests need.
MODEL_IMPORTS = ("torch", "transformers", "datasets")
MODEL_FOLDERS = (
    "api",
    "client",
    "data",
    "environments",
    "generation",
    "learning",
    "migrate",
    "quickstart",
    "scoring",
    "sizing",
    "weights",
)
"""Folders whose pure tests import these, or SymPy."""


def part_of(path: str) -> str:
    """The part of the pure tests that a module or a folder in `tests` belongs to: `models` or `others`."""
    return "models" if path.split("/")[1] in MODEL_FOLDERS else "others"
