"""The arms of the comparison: who trains how, and for how long."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ONE_CARD_CONFIG, TWO_CARDS_CONFIG = "configs/gsm8k-1gpu.yaml", "configs/gsm8k-2gpu.yaml"

START_SECONDS = 210.0
"""What an arm may take before its first step (vLLM's start took 35 to 75 s, a server's too) and after its last (evaluation,
last state)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is the same in every arm."""

    model: str
    data: str
    """A folder with GSM8K's `train.jsonl` and `test.jsonl`."""
    prompts: int = 16
    max_tokens: int = 512
    learning_rate: float = 2e-6
    warmup_steps: int = 3
    seed: int = 1
    server: str | None = None
    """Address of the vLLM server that arms in TRL's server mode generate with; None: each starts one of its own."""
    device: str = "cuda"
    """`cpu`: without vLLM on both sides, to try the script out; its figures mean nothing."""
    held_out: int | None = None
    """Held-out rows of an evaluation; None: all."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One run of one trainer."""

    name: str
    peer: str
    """`ours` or `trl`."""
    n: int
    """Rollouts a prompt."""
    m: int
    """Of which trained."""
    staleness: int
    seconds: float
    """Seconds of steps, evaluations left out; the step under way is finished."""
    evaluate: int = 0
    """Steps between greedy evaluations on held-out rows, also before the first and after the last; 0: none."""
    options: dict[str, Any] = field(default_factory=dict)
    """For ours: fields of the configuration. For TRL: fields of its GRPOConfig."""
    cards: int = 1
    """Cards that it uses, a server's among them."""
    config: str = ONE_CARD_CONFIG
    """For ours: the configuration that `options` change."""

    @property
    def serves(self) -> bool:
        """Whether it generates with a vLLM server on another card."""
        return self.options.get("vllm_mode") == "server"

    def deadline(self) -> float:
        """Seconds after which the arm is ended."""
        return START_SECONDS + 1.4 * self.seconds + (90.0 if self.evaluate else 0.0)

    def plain(self) -> dict[str, Any]:
        """Its fields for a file: the configuration by its name, and only where it is used."""
        found = asdict(self) | {"config": Path(self.config).name}
        if self.peer != "ours":
            del found["config"]
        return found


ONE_ENGINE = {
    "generator.workers": 1,
    "generator.gpus_per_worker": 0.5,
    "generator.max_sequences": 1024,
    "generator.engine_options.kv_cache_gb": 12,
}
"""In place of the two engines of the configuration."""

SERVER = {"vllm_mode": "server", "per_device_train_batch_size": 64, "vllm_server_timeout": 150.0}
TWO_CARDS = {
    "generator.workers": 3,
    "generator.gpus_per_worker": 0.33,
    "generator.max_sequences": 512,
    "generator.engine_options.kv_cache_gb": 10,
    "generator.engine_options.gpu_memory_utilization": 0.2,
    "learner.gpus_per_worker": 1,
}
"""As in configs/gsm8k-2gpu.yaml: three engines share one card, the learner has the other."""

# In the order of their worth, the two trainers in turn. TRL's micro-batch of 64 rollouts is the largest power of two that was
# tried on 141 GB without checkpointing; its vLLM takes 0.3 of the card, as much cache as 1,024 rollouts of 1,024 tokens need.
ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("ours-16-sync", "ours", 16, 16, 0, 75, options=ONE_ENGINE),
        Arm("trl-16", "trl", 16, 16, 0, 150, evaluate=10, options={"per_device_train_batch_size": 64}),
        Arm("ours-16-k1", "ours", 16, 16, 1, 75, options=ONE_ENGINE),
        Arm("ours-64-k1-two-engines", "ours", 64, 16, 1, 150, evaluate=10),
        Arm("trl-64", "trl", 64, 64, 0, 150, evaluate=2, options={"per_device_train_batch_size": 64}),
        Arm("ours-64-k1", "ours", 64, 16, 1, 75, options=ONE_ENGINE),
        Arm("ours-64-k2", "ours", 64, 16, 2, 75, options=ONE_ENGINE | {"weights.verify": True}),
        Arm("ours-64-k2-two-engines", "ours", 64, 16, 2, 75),
        Arm("ours-64-sync", "ours", 64, 16, 0, 60, options=ONE_ENGINE),
        Arm(
            "trl-16-uncorrected",
            "trl",
            16,
            16,
            0,
            60,
            options={"per_device_train_batch_size": 64, "vllm_importance_sampling_correction": False},
        ),
        Arm("trl-16-server", "trl", 16, 16, 0, 75, options=SERVER, cards=2),
        Arm("trl-64-server", "trl", 64, 64, 0, 150, options=SERVER, cards=2),
        Arm("ours-16-k1-two-cards", "ours", 16, 16, 1, 75, options=TWO_CARDS, cards=2, config=TWO_CARDS_CONFIG),
        Arm("ours-64-k3-two-cards", "ours", 64, 16, 3, 75, options=TWO_CARDS, cards=2, config=TWO_CARDS_CONFIG),
    )
}
"""`trl-16-uncorrected` leaves out TRL's correction for vLLM's log-probabilities, and with it a forward pass over all
rollouts; ours corrects in every arm."""
ONE_CARD = tuple(name for name, arm in ARMS.items() if arm.cards == 1)
"""Arms that run on one card."""
