"""One rank's state goes on as two ranks', and two ranks' as one's: weights and losses stay those of a run without."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from pods_cluster.learning import rank_checkpoint
from pods_cluster.learning.trainer import Trainer
from tests.learning import resharding
from tests.learning.resharding import CASES, RATES, config_of, second_half, steps
from tests.learning.support import OneBigBatch, make_step
from tests.learning.test_trainer import assert_same_parameters


@pytest.fixture(scope="module")
def changed(two, model_folder):
    """What each change found: {"grown" (1 to 2) | "shrunk" (2 to 1): {case: (first half, second half)}}, by rank 0."""
    alone = {case: second_half(case, model_folder, two.folder / "shrunk", 0, 1) for case in CASES}

    def together(way, case):
        one, other = (found["resharding"][way][case] for found in two.found)
        return {**one, "losses": [a + b for a, b in zip(one["losses"], other["losses"], strict=True)]}

    return {
        "folder": two.folder,
        "grown": {case: (two.before[case], together("grown", case)) for case in CASES},
        "shrunk": {case: (together("shrunk", case), alone[case]) for case in CASES},
    }


@pytest.fixture(scope="module")
def unchanged(model_folder):
    """The same four steps in plain torch."""
    truth = OneBigBatch(config_of("zero1", model_folder, 1, 0), AutoModelForCausalLM.from_pretrained(model_folder))
    for step, rate in enumerate(RATES):
        truth.step(*make_step(step), rate)
    return truth


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("zero")])
@pytest.mark.parametrize("way", ["grown", "shrunk"])
def test_a_changed_run_equals_an_unchanged_one(changed, unchanged, way, case):
    before, after = changed[way][case]
    assert_same_parameters(after["weights"], unchanged.parameters())
    assert [*before["losses"], *after["losses"]] == pytest.approx(unchanged.losses, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["grown", "shrunk"])
def test_not_a_bit_of_the_state_changes_on_its_way(changed, way, case):
    before, after = changed[way][case]
    assert before["weights"].keys() == after["loaded"].keys()
    for name, tensor in before["weights"].items():
        assert torch.equal(tensor, after["loaded"][name]), name
    saved, again = (whole(changed["folder"] / way / folder) for folder in (case, f"{case}-again"))
    assert saved.keys() == again.keys()
    assert {key.split(" ")[0] for key in saved} == {"master", "exp_avg", "exp_avg_sq"}
    for key, tensor in saved.items():
        assert torch.equal(tensor, again[key]), key
    first, second = (meta(changed["folder"] / way / folder) for folder in (case, f"{case}-again"))
    assert first["steps"] == second["steps"] == resharding.HALF
    assert first["world_size"] != second["world_size"]


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("zero")])
@pytest.mark.parametrize("way", ["grown", "shrunk"])
def test_adapters_and_half_precision_go_on_as_without_a_change(changed, model_folder, way, case):
    config = config_of(case, model_folder, 1, 0)
    trainer = Trainer(config, 0, 1)
    losses = [*steps(trainer, config, 0), *steps(trainer, config, 1)]
    before, after = changed[way][case]
    # bfloat16 sums in another order differ in their last bit, and so in what follows
    close = 2e-2 if case.startswith("bf16") else 1e-4
    assert [*before["losses"], *after["losses"]] == pytest.approx(losses, rel=close, abs=close)
    for name, tensor in resharding.weights(trainer).items():
        torch.testing.assert_close(after["weights"][name], tensor, rtol=close, atol=close)


@pytest.mark.parametrize("case", ["zero1", "zero3", "bf16-zero1"])
def test_a_trained_rank_goes_back_to_before_its_first_step(one_rank, model_folder, tmp_path, case):
    config = config_of(case, model_folder, 1, 0)
    trainer = Trainer(config, 0, 1)
    rank_checkpoint.save(trainer, tmp_path / "start", 1)
    losses, trained = steps(trainer, config, 0), resharding.weights(trainer)
    rank_checkpoint.load(trainer, tmp_path / "start", 1)
    assert steps(trainer, config, 0) == losses
    for name, tensor in resharding.weights(trainer).items():
        assert torch.equal(tensor, trained[name]), name


def test_a_missing_file_is_named(changed, one_rank, model_folder, tmp_path):
    saved = changed["folder"] / "shrunk" / "zero3"
    for path in saved.iterdir():
        if not path.name.startswith("fragments-00001"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    trainer = Trainer(config_of("zero3", model_folder, 1, 0), 0, 1)
    with pytest.raises(
        rank_checkpoint.LearnerCheckpointError, match=r"incomplete learner checkpoint.*files are missing"
    ):
        rank_checkpoint.load(trainer, tmp_path, 1)


def test_another_model_is_refused(changed, one_rank, model_folder, tmp_path):
    saved = changed["folder"] / "shrunk" / "zero3"
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    told = meta(tmp_path)
    told["shapes"]["model.model.norm.weight"] = [128]
    (tmp_path / rank_checkpoint.META_FILE).write_text(json.dumps(told))
    trainer = Trainer(config_of("zero3", model_folder, 1, 0), 0, 1)
    with pytest.raises(rank_checkpoint.LearnerCheckpointError, match=r"holds model\.model\.norm\.weight as \(128,\)"):
        rank_checkpoint.load(trainer, tmp_path, 1)


def meta(folder):
    return json.loads((folder / rank_checkpoint.META_FILE).read_text())


def whole(folder):
    """All pieces of a folder put together: {"kind name": tensor}."""
    pieces = {}
    for path in folder.glob("fragments-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                kind, start, name = key.split(" ", 2)
                pieces.setdefault(f"{kind} {name}", []).append((int(start), file.get_tensor(key)))
    return {key: torch.cat([t for _, t in sorted(found, key=lambda piece: piece[0])]) for key, found in pieces.items()}
