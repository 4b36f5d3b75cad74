import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from pods_cluster.config import ConfigError
from pods_cluster.learning.forward import Policy
from pods_cluster.learning.kernel_choice import apply_kernels, choose_kernels, choose_packing
from pods_cluster.learning.policy_model import ModelError, load_model
from pods_cluster.learning.token_batch import pack
from tests.learning.support import config_for, make_step
from tests.learning.test_forward import SIZES


def mistral(window):
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, head_dim=16, sliding_window=window))


def gemma2():
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16, attn_implementation="eager"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_without_a_gpu_kernels_are_plain_and_liger_is_refused(model_folder):
    config = config_for(model_folder)
    assert choose_kernels(load_model(config.model), config.learner) == ("plain", "Liger's kernels need a GPU")
    config = config_for(model_folder, kernels="liger")
    with pytest.raises(ModelError, match=r"learner\.kernels: liger is not possible: .* GPU.*learner\.kernels: auto"):
        choose_kernels(load_model(config.model), config.learner)


def test_packing_is_on_where_the_model_allows_it(model_folder):
    config = config_for(model_folder, top={"model": {"attention": "sdpa"}})
    assert choose_packing([Policy(load_model(config.model))], config)[0]
    assert choose_packing([Policy(mistral(28))], config)[0]  # 12 prompt and 16 completion tokens
    off = config_for(model_folder, packing="off")
    assert choose_packing([Policy(load_model(config.model))], off) == (False, "as configured")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: mistral(27), "attends to 27 tokens back, and sequences have up to 28"),
        (gemma2, "softcap"),
    ],
    ids=["sliding-window", "capped-scores"],
)
def test_packing_is_off_where_the_model_attends_otherwise(model_folder, model, why):
    policy = Policy(model())
    before = policy.model.config._attn_implementation
    on, reason = choose_packing([policy], config_for(model_folder))
    assert not on
    assert why in reason
    assert policy.model.config._attn_implementation == before
    with pytest.raises(ModelError, match=r"learner\.packing: on is not possible: .*learner\.packing: auto"):
        choose_packing([policy], config_for(model_folder, packing="on"))


def test_a_model_that_mixes_up_its_sequences_is_not_packed(model_folder, monkeypatch):
    """The sequences of a pack see each other: the comparison finds it."""
    from pods_cluster.learning import packed_attention

    def whole_row(module, query, key, value, mask, *, layout=None, **options):
        return packed_attention.sdpa_attention_forward(module, query, key, value, mask, **options)

    monkeypatch.setitem(packed_attention.AttentionInterface._global_mapping, packed_attention.NAME, whole_row)
    config = config_for(model_folder)
    on, reason = choose_packing([Policy(load_model(config.model))], config)
    assert not on
    assert "computes packed sequences differently" in reason


def test_an_attention_that_was_asked_for_stays(model_folder):
    config = config_for(model_folder, top={"model": {"attention": "eager"}})
    on, reason = choose_packing([Policy(load_model(config.model))], config)
    assert (on, "model.attention is eager" in reason) == (False, True)
    with pytest.raises(
        ConfigError, match=r"learner\.packing: on brings its own attention, but model\.attention is eager"
    ):
        config_for(model_folder, packing="on", top={"model": {"attention": "eager"}})


def test_compiled_layers_compute_the_same_and_are_compiled_once(model_folder, monkeypatch):
    """Packs of other shapes and layouts find the layers compiled. The graphs run without a compiler, which takes a
    minute on a CPU."""
    compile_layer = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda layer, **options: compile_layer(layer, backend="eager", **options)
    )
    torch._dynamo.reset()
    policy = Policy(load_model(config_for(model_folder).model).train())
    policy.enable_chunked_head()
    assert policy.enable_packing() is None
    steps = [list(make_step(seed, kept)[1].values()) for seed, kept in enumerate([(4, 4, 3), (2, 4), (3, 3, 4, 2, 1)])]
    batches = [pack([(rollout.prompt_ids, rollout.token_ids) for rollout in step]) for step in steps]
    expected = [gradients_of(policy, batch) for batch in batches]
    assert choose_kernels(policy.model, config_for(model_folder, kernels="compile").learner)[0] == "compile"
    apply_kernels(policy.model, "compile")
    for index, batch in enumerate(batches):
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            found = gradients_of(policy, batch)
        torch.testing.assert_close(found, expected[index], rtol=1e-5, atol=1e-5)


def gradients_of(policy, batch):
    policy.zero_grad()
    policy(batch, 1.0, lambda log_probs, _: log_probs)[2].backward()
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}


def test_compiled_layers_and_zero_3_are_refused(model_folder):
    with pytest.raises(ConfigError, match=r"kernels: compile does not work with zero_stage: 3"):
        config_for(model_folder, kernels="compile", zero_stage=3)
