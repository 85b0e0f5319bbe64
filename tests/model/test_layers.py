import json

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import LlamaConfig

from slideformer_ray.model.families import family_of
from slideformer_ray.model.layers import (
    HeadTemplate,
    LayerTemplate,
    RotaryTable,
    describe_model,
    flat_views,
    load_hf_config,
    padding_row,
)
from slideformer_ray.model.spec import ALIGN_ELEMENTS


def flat_buffers(spec, state, dtype=torch.float32):
    """Each block's flat buffer, filled from a state dict; NaN between the parameters, where nothing may read."""
    buffers = []
    for block in spec.blocks:
        flat = torch.full((block.numel,), torch.nan, dtype=dtype)
        for name, view in flat_views(block, flat).items():
            view.copy_(state[name])
        buffers.append(flat)
    return buffers


def leaves(views):
    return tuple(view.detach().requires_grad_() for view in views)


class TestDescribeModel:
    def test_parameters_are_those_of_transformers(self, hf_config, hf_model):
        """Names, shapes and number of parameters equal the whole model's; a tied head is not listed again."""
        spec = describe_model(hf_config)
        ours = {p.name: p.shape for block in spec.blocks for p in block.params}
        assert ours == {name: tuple(p.shape) for name, p in hf_model.named_parameters()}
        assert spec.num_parameters == hf_model.num_parameters()
        assert spec.tied == hf_config.tie_word_embeddings

    def test_blocks_are_embedding_layers_head(self, hf_config):
        """Block 0 is the embedding, L + 1 the head, between them the layers in order."""
        spec = describe_model(hf_config)
        assert [b.kind for b in spec.blocks] == ["embed", "decoder", "decoder", "decoder", "head"]
        assert [b.layer for b in spec.blocks] == [None, 0, 1, 2, None]
        assert [b.index for b in spec.blocks] == [0, 1, 2, 3, 4]
        assert len({b.template for b in spec.decoder}) == 1

    def test_layout_is_aligned_and_grouped(self, hf_config):
        """Trainable with decay, then trainable without, then frozen; each aligned, none overlapping the next."""
        spec = describe_model(hf_config, frozen=["*.k_proj.*", "*.post_attention_layernorm.*"])
        for block in spec.blocks:
            groups = [(p.frozen, not p.decay) for p in block.params]
            assert groups == sorted(groups)
            assert all(p.offset % ALIGN_ELEMENTS == 0 for p in block.params)
            ends = [p.offset + p.numel for p in block.params]
            assert all(end <= p.offset for end, p in zip(ends, block.params[1:], strict=False))
            assert block.numel % ALIGN_ELEMENTS == 0 and block.numel >= ends[-1]
            assert all((p.offset >= block.trainable_numel) == p.frozen for p in block.params)

    def test_only_matrices_decay(self, hf_config):
        """No decay on norms' weights (1-D) and biases."""
        spec = describe_model(hf_config)
        for p in (p for block in spec.blocks for p in block.params):
            assert p.decay == (not p.name.endswith((".bias", "norm.weight")))

    def test_frozen_patterns_match_keys(self, hf_config):
        """Shell patterns of state-dict keys; the rest stays trainable."""
        spec = describe_model(hf_config, frozen=["model.embed_tokens.*", "model.layers.[01].*"])
        frozen = {p.name for block in spec.blocks for p in block.params if p.frozen}
        assert {name.split(".")[1] for name in frozen} == {"embed_tokens", "layers"}
        assert not any(name.startswith("model.layers.2") for name in frozen)
        assert [b.trainable_numel == 0 for b in spec.blocks] == [True, True, True, False, False]

    def test_a_frozen_pattern_that_matches_nothing_is_refused(self, hf_config):
        """A misspelt pattern must not silently train what was meant to stay."""
        with pytest.raises(
            ValueError, match=r"^model.frozen: pattern 'layers.0.\*' matches no parameter; .*named like"
        ):
            describe_model(hf_config, frozen=["layers.0.*"])

    def test_freezing_a_tied_head_names_the_embedding(self):
        """The head of a tied model is the embedding; the message says which name to freeze."""
        with pytest.raises(ValueError, match="lm_head.weight is tied to model.embed_tokens.weight; freeze that one"):
            describe_model(LlamaConfig(num_hidden_layers=1, tie_word_embeddings=True), frozen=["lm_head.*"])

    def test_freezing_everything_is_refused(self, hf_config):
        """A run that can train nothing does not start."""
        with pytest.raises(ValueError, match="nothing is left to train"):
            describe_model(hf_config, frozen=["*"])

    def test_a_70b_model_is_described_without_its_memory(self):
        """Only one decoder layer is built, on the meta device: a plan of any size is free."""
        config = LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
        )
        assert describe_model(config).num_parameters == 70_553_706_496

    def test_checkpoint_dtype_is_that_of_the_config(self):
        """config.json's dtype unless told; float32 where it has none, as transformers has it."""
        assert describe_model(LlamaConfig(num_hidden_layers=1, dtype="bfloat16")).checkpoint_dtype == "bfloat16"
        assert describe_model(LlamaConfig(num_hidden_layers=1)).checkpoint_dtype == "float32"
        assert describe_model(LlamaConfig(num_hidden_layers=1), (), "float16").checkpoint_dtype == "float16"


class TestFlatViews:
    def test_views_alias_the_buffer(self, hf_config):
        """A write to the buffer shows in the view: nothing is copied."""
        block = describe_model(hf_config).decoder[1]
        flat = torch.zeros(block.numel)
        views = flat_views(block, flat)
        flat.copy_(torch.arange(block.numel))
        for p in block.params:
            assert views[p.name].shape == p.shape
            assert views[p.name].flatten()[-1] == p.offset + p.numel - 1

    def test_a_gradient_buffer_has_views_of_trainable_parameters_alone(self, hf_config):
        """A gradient buffer ends where the frozen parameters begin; the template gives None for those."""
        spec = describe_model(hf_config, frozen=["*.k_proj.weight"])
        block = spec.decoder[0]
        gradient = torch.zeros(block.trainable_numel)
        assert set(flat_views(block, gradient)) == {p.name for p in block.params if not p.frozen}
        template = LayerTemplate(hf_config, 0, torch.float32, "cpu")
        views = dict(zip(template.param_names, template.views(block, gradient), strict=True))
        assert [name for name, view in views.items() if view is None] == ["self_attn.k_proj.weight"]

    def test_a_longer_buffer_is_a_cache_unit(self, hf_config):
        """Units are sized for the largest layer; a smaller one uses their head."""
        block = describe_model(hf_config).decoder[0]
        assert len(flat_views(block, torch.zeros(block.numel + 1000))) == len(block.params)


class TestLayers:
    def test_loss_and_all_gradients_equal_the_whole_model(self, hf_config, hf_model):
        """Embedding, templates on flat buffers and head give transformers' logits, and every gradient."""
        torch.manual_seed(1)
        ids = torch.randint(1, hf_config.vocab_size, (3, 17))
        ids[1, 9:] = 0
        hf_logits = hf_model(input_ids=ids, use_cache=False).logits
        weights = torch.randn_like(hf_logits)
        (hf_logits * weights).sum().backward()

        spec = describe_model(hf_config)
        buffers = flat_buffers(spec, hf_model.state_dict())
        template = LayerTemplate(hf_config, 0, torch.float32, "cpu")
        head = HeadTemplate(hf_config)
        cos, sin = RotaryTable(hf_config, "cpu", torch.float32)(torch.arange(17).expand(3, -1))
        params: dict[str, torch.Tensor] = {}
        for block, flat in zip(spec.blocks, buffers, strict=True):
            params.update(zip([p.name for p in block.params], leaves(flat_views(block, flat).values()), strict=True))

        x = F.embedding(ids, params["model.embed_tokens.weight"], padding_idx=padding_row(hf_config))
        for block in spec.decoder:
            layer = tuple(params[f"model.layers.{block.layer}.{name}"] for name in template.param_names)
            x = template(x, cos, sin, layer)
        x = head.norm(x, tuple(params[name] for name in head.norm_keys))
        logits = F.linear(x, params[head.projection_key])
        (logits * weights).sum().backward()

        torch.testing.assert_close(logits, hf_logits, rtol=1e-5, atol=1e-5)
        for name, p in hf_model.named_parameters():
            torch.testing.assert_close(params[name].grad, p.grad, rtol=1e-5, atol=1e-5 * p.grad.abs().max().item())

    def test_bf16_layer_is_bit_equal_to_transformers(self, hf_config, hf_model):
        """The same operations in the same dtype: not a bit differs."""
        model = hf_model.bfloat16()
        block = describe_model(hf_config).decoder[1]
        (flat,) = flat_buffers(describe_model(hf_config), model.state_dict(), torch.bfloat16)[2:3]
        template = LayerTemplate(hf_config, 1, torch.bfloat16, "cpu")
        x = torch.randn(2, 11, hf_config.hidden_size, dtype=torch.bfloat16)
        rotary = RotaryTable(hf_config, "cpu", torch.bfloat16)(torch.arange(11).expand(2, -1))
        theirs = model.model.layers[1](x, attention_mask=None, position_embeddings=rotary)
        assert torch.equal(template(x, *rotary, template.views(block, flat)), theirs)

    def test_no_mask_is_causal(self, hf_config, make_model):
        """With sdpa and no mask a token sees itself and what precedes it: as eager attention with a mask does."""
        eager = make_model(hf_config)
        eager.set_attn_implementation("eager")
        x = torch.randn(2, 19, hf_config.hidden_size)
        rotary = RotaryTable(hf_config, "cpu", torch.float32)(torch.arange(19).expand(2, -1))
        mask = torch.full((19, 19), torch.finfo(torch.float32).min).triu(1)[None, None]
        theirs = eager.model.layers[0](x, attention_mask=mask, position_embeddings=rotary)
        spec = describe_model(hf_config)
        template = LayerTemplate(hf_config, 0, torch.float32, "cpu")
        params = template.views(spec.decoder[0], flat_buffers(spec, eager.state_dict())[1])
        torch.testing.assert_close(template(x, *rotary, params), theirs, rtol=1e-5, atol=1e-5)

    def test_a_row_never_sees_its_padding(self, hf_config, hf_model):
        """What stands to the right of a row's end changes neither its outputs nor the gradients of its weights."""
        spec = describe_model(hf_config)
        flat = flat_buffers(spec, hf_model.state_dict())[1]
        template = LayerTemplate(hf_config, 0, torch.float32, "cpu")
        table = RotaryTable(hf_config, "cpu", torch.float32)
        x = torch.randn(2, 9, hf_config.hidden_size)
        padded = torch.cat([x, 1e3 * torch.randn(2, 6, hf_config.hidden_size)], dim=1)
        results = []
        for rows in (x, padded):
            params = leaves(template.views(spec.decoder[0], flat))
            out = template(rows, *table(torch.arange(rows.shape[1]).expand(2, -1)), params)[:, :9]
            results.append((out, *torch.autograd.grad(out.square().sum(), params)))
        for short, long in zip(*results, strict=True):
            torch.testing.assert_close(short, long, rtol=1e-5, atol=1e-4)

    def test_the_callers_config_is_not_changed(self, hf_config):
        """A template chooses its attention for itself alone."""
        before = hf_config.to_dict(), hf_config._attn_implementation
        LayerTemplate(hf_config, 0, torch.float32, "cpu", attn_implementation="eager")
        assert (hf_config.to_dict(), hf_config._attn_implementation) == before

    @pytest.mark.parametrize("hf_config", ["qwen2-tied"], indirect=True)
    def test_repointing_a_compiled_template_recompiles_nothing(self, hf_config):
        """Weights are graph inputs: 8 layers' buffers run through one full graph, with the right gradients."""
        assert_one_graph_and_right_gradients(hf_config, "aot_eager", "cpu", torch.float32, 1e-6)

    @pytest.mark.gpu
    def test_repointing_an_inductor_template_recompiles_nothing_on_the_gpu(self, hf_config):
        """The same with the compiler, device and dtype of a real run; tolerance: bf16 rounds at 2^-8."""
        assert_one_graph_and_right_gradients(hf_config, "inductor", "cuda", torch.bfloat16, 3e-2)


def assert_one_graph_and_right_gradients(hf_config, backend, device, dtype, tolerance):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    template = LayerTemplate(hf_config, 0, dtype, device)
    compiled = torch.compile(template, fullgraph=True, backend=counter)
    block = describe_model(hf_config).decoder[0]
    cos, sin = RotaryTable(hf_config, device, dtype)(torch.arange(12, device=device).expand(2, -1))
    # Two units of one arena, re-used in turn, as the sliding window does.
    arena = torch.empty(2 * block.numel, device=device, dtype=dtype)
    for layer in range(8):
        unit = arena[layer % 2 * block.numel :][: block.numel]
        unit.normal_(std=0.1)
        x = torch.randn(2, 12, hf_config.hidden_size, device=device, dtype=dtype, requires_grad=True)
        params = leaves(template.views(block, unit))
        gradient = torch.randn_like(x)
        ours = torch.autograd.grad(compiled(x, cos, sin, params), [x, *params], gradient)
        plain = torch.autograd.grad(template(x, cos, sin, params), [x, *params], gradient)
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, b.abs().max().item()))
    assert counter.frame_count == 1


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8192},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


class TestRotaryTable:
    @pytest.mark.parametrize("rope", ROPES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_equals_transformers_far_out(self, rope, dtype):
        """cos and sin at position 30,000 are transformers' own bits, for every rope type, in each compute dtype."""
        config = LlamaConfig(
            hidden_size=64, num_attention_heads=4, max_position_embeddings=32768, rope_parameters=ROPES[rope]
        )
        positions = torch.stack([torch.arange(30000, 30016), torch.arange(16)])
        theirs = family_of(config).rotary(config)(torch.empty(1, dtype=dtype), positions)
        ours = RotaryTable(config, "cpu", dtype)(positions)
        assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(ours, theirs, strict=True))

    def test_frequencies_stay_fp32(self):
        """bf16 frequencies would shift position 30,000 by whole turns."""
        table = RotaryTable(LlamaConfig(hidden_size=64, num_attention_heads=4), "cpu", torch.bfloat16)
        assert {b.dtype for b in table.module.buffers()} == {torch.float32}


class TestPaddingRow:
    def test_it_is_the_row_without_look_up_gradient(self, hf_config, hf_model):
        """transformers builds the embedding with padding_idx: its row learns from the head alone, if at all."""
        ids = torch.tensor([[0, 5, 0, 7]])
        embedded = hf_model.get_input_embeddings()(ids)
        (gradient,) = torch.autograd.grad(embedded.sum(), hf_model.get_input_embeddings().weight)
        assert not gradient[padding_row(hf_config)].any() and gradient[5].all()

    @pytest.mark.parametrize(("pad", "row"), [(None, None), (3, 3), (-1, 99)])
    def test_it_is_counted_as_torch_does(self, pad, row):
        """None means that every row learns; a negative token counts from the end."""
        assert padding_row(LlamaConfig(vocab_size=100, pad_token_id=pad)) == row


class TestLoadHfConfig:
    def test_a_directory_and_its_file_give_the_same(self, hf_config, tmp_path):
        """What save_pretrained wrote is read back."""
        hf_config.save_pretrained(tmp_path)
        for path in (tmp_path, tmp_path / "config.json", str(tmp_path)):
            assert load_hf_config(path).to_diff_dict() == hf_config.to_diff_dict()

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (None, "config.json: cannot be read .No such file or directory."),
            ("{", "config.json: not valid JSON"),
            ("[]", "config.json: expected a JSON object, found list"),
            ('{"model_type": "mamba"}', "config.json: model_type 'mamba' is not supported; supported: llama, qwen2"),
            ("{}", "config.json: model_type None is not supported"),
            ('{"model_type": "llama", "hidden_size": "x"}', "config.json: refused by transformers: .*hidden_size"),
        ],
    )
    def test_a_bad_file_is_one_line(self, tmp_path, text, message):
        """The file, what is wrong, and never a question to the hub."""
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=f"{message}[^\n]*$"):
            load_hf_config(tmp_path)

    def test_keys_of_older_releases_are_understood(self, tmp_path):
        """rope_scaling and torch_dtype, as Llama-3.1's own config.json has them."""
        rope = {k: v for k, v in ROPES["llama3"].items() if k != "rope_theta"}
        values = {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": rope, "torch_dtype": "bfloat16"}
        (tmp_path / "config.json").write_text(json.dumps(values))
        config = load_hf_config(tmp_path)
        assert config.rope_parameters["rope_type"] == "llama3" and config.rope_parameters["rope_theta"] == 500000.0
        assert config.dtype == torch.bfloat16
