import json
import os
import struct
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from slideformer_ray.data.quickstart import quickstart_model_dir
from slideformer_ray.kernels.layer_adam import join_master
from slideformer_ray.model import weights
from slideformer_ray.model.layers import describe_model, flat_views, load_hf_config
from slideformer_ray.model.spec import slice_of
from slideformer_ray.model.weights import WeightFiles, init_block_slice, load_block_slice, save_model

INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces and chunks far smaller than a tensor, and no multiple of a row, so that every cut is taken."""
    monkeypatch.setattr(weights, "PIECE_ELEMENTS", 131)
    monkeypatch.setattr(weights, "INIT_CHUNK_ELEMENTS", 257)


@pytest.fixture
def saved(hf_model, tmp_path):
    """A model directory in shards, as transformers writes it."""
    hf_model.save_pretrained(tmp_path / "source", max_shard_size="40KB")
    return tmp_path / "source"


@pytest.fixture
def llama(make_model):
    return make_model(
        LlamaConfig(
            vocab_size=31,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
    )


def rewrite(file, change):
    """Load a safetensors file, change its dict of tensors, write it back."""
    tensors = load_file(file)
    tensors = {name: t.clone() for name, t in tensors.items()}  # not in the map of the file that is overwritten
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def load_block(files, block, precision, num_actors=1):
    """(hi, lo) of a whole block, filled slice by slice as `num_actors` owners would."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    hi = torch.full((block.numel,), torch.nan, dtype=dtype)
    lo = torch.full((block.numel,), 77, dtype=torch.int16) if precision == "bf16" else None
    for k in range(num_actors):
        a, b = slice_of(block.numel, k, num_actors)
        load_block_slice(files, block, a, b, hi[a:b], None if lo is None else lo[a:b], precision)
    return hi, lo


class TestWeightFiles:
    def test_the_shipped_model_passes(self):
        """The quickstart's model is what its config.json describes."""
        config = load_hf_config(quickstart_model_dir())
        files = WeightFiles(quickstart_model_dir())
        files.check(describe_model(config))
        assert files.dtype("model.embed_tokens.weight") == torch.bfloat16 and files.notes == []

    def test_a_good_checkpoint_passes(self, hf_config, saved):
        """Shards as transformers writes them hold exactly the model's parameters."""
        assert (saved / INDEX).exists()
        with WeightFiles(saved) as files:
            files.check(describe_model(hf_config))
            assert files.notes == []

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_ranges_are_those_of_the_flattened_tensor(self, hf_model, tmp_path, dtype):
        """Any [start, stop), within a row or across rows, of matrices and vectors, in the stored dtype."""
        hf_model.to(dtype).save_pretrained(tmp_path)
        files = WeightFiles(tmp_path)
        for name, p in hf_model.named_parameters():
            flat = p.detach().flatten()
            for a, b in [(0, flat.numel()), (0, 1), (5, 17), (flat.numel() - 1, flat.numel())]:
                got = files.read_range(name, a, b)
                assert got.dtype == dtype and torch.equal(got, flat[a:b])

    def test_a_directory_without_weights_is_refused(self, tmp_path):
        """The two names looked for, and how to convert."""
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(ValueError, match=f"holds neither model.safetensors nor {INDEX}; convert"):
            WeightFiles(tmp_path)

    def test_an_index_that_is_no_index_is_refused(self, tmp_path):
        """One line, no traceback of a JSON parser."""
        (tmp_path / INDEX).write_text('{"weight_map": 3}')
        with pytest.raises(ValueError, match=f"{INDEX}: not an index"):
            WeightFiles(tmp_path)

    def test_a_missing_shard_is_named(self, saved):
        """The file, and a key that it should hold."""
        shard = sorted(saved.glob("model-*"))[1]
        shard.unlink()
        with pytest.raises(ValueError, match=rf"{shard.name}: this shard is missing; .* such as model\."):
            WeightFiles(saved)

    def test_a_key_of_the_index_that_its_shard_lacks_is_named(self, saved):
        """Index against header, one way."""
        index = json.loads((saved / INDEX).read_text())
        key, shard = next(iter(index["weight_map"].items()))
        rewrite(saved / shard, lambda tensors: tensors.pop(key))
        with pytest.raises(ValueError, match=f"{shard}: .* places {key} in this shard, which does not hold it"):
            WeightFiles(saved)

    def test_a_key_of_a_shard_that_the_index_lacks_is_named(self, saved):
        """Index against header, the other way: shards of two saves were mixed."""
        shard = sorted(saved.glob("model-*"))[0]
        rewrite(shard, lambda tensors: tensors.update(stray=torch.zeros(3)))
        with pytest.raises(ValueError, match=f"{shard.name}: holds stray, which .* does not place in this shard"):
            WeightFiles(saved)

    @pytest.mark.parametrize("keep", [0, 5, 60, -1])
    def test_a_torn_shard_is_named(self, saved, keep):
        """Cut in the length, in the header, or in the last tensor: refused before anything is read."""
        shard = sorted(saved.glob("model-*"))[-1]
        os.truncate(shard, keep % shard.stat().st_size)
        with pytest.raises(ValueError, match=rf"{shard.name}: torn: \d+ bytes") as error:
            WeightFiles(saved)
        assert "fetch the file again" in str(error.value) and "\n" not in str(error.value)

    def test_a_torn_shard_names_a_key_that_is_cut(self, saved):
        """The key whose bytes end past the file."""
        shard = sorted(saved.glob("model-*"))[-1]
        length = struct.unpack("<Q", shard.read_bytes()[:8])[0]
        header = json.loads(shard.read_bytes()[8 : 8 + length])
        header.pop("__metadata__")
        last = max(header, key=lambda key: header[key]["data_offsets"])
        os.truncate(shard, shard.stat().st_size - 1)
        with pytest.raises(ValueError, match=f"tensors cut: 1, such as {last}"):
            WeightFiles(saved)

    def test_a_file_that_is_no_safetensors_is_named(self, tmp_path):
        """An error page saved under the file's name, for one."""
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 20) + b"<html>404 not found</html>")
        with pytest.raises(ValueError, match="model.safetensors: not a safetensors file"):
            WeightFiles(tmp_path)

    def test_bytes_past_the_last_tensor_are_refused(self, saved):
        """The library's own check; its error is turned into one line with the file."""
        shard = sorted(saved.glob("model-*"))[0]
        with shard.open("ab") as f:
            f.write(b"\0" * 8)
        with pytest.raises(ValueError, match=f"{shard.name}: refused by safetensors"):
            WeightFiles(saved)


class TestCheck:
    def saved_with(self, llama, tmp_path, change):
        llama.save_pretrained(tmp_path)
        rewrite(tmp_path / "model.safetensors", change)
        return WeightFiles(tmp_path), describe_model(llama.config)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
            (
                lambda t: t.update({"model.norm.weight": torch.ones(17)}),
                r"model.norm.weight has shape \[17\], config.json asks for \[16\]",
            ),
            (
                lambda t: t.update({"model.norm.weight": torch.ones(16, dtype=torch.float64)}),
                "model.norm.weight is stored as F64; supported: F32, BF16, F16",
            ),
            (
                lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(24, 16)}),
                "model.layers.2.mlp.up_proj.weight is not a parameter of the model",
            ),
        ],
    )
    def test_a_mismatch_is_named(self, llama, tmp_path, change, message):
        """Missing, misshapen, of a dtype that fp32 cannot hold, or left over: file and key are named."""
        files, spec = self.saved_with(llama, tmp_path, change)
        with pytest.raises(ValueError, match=message):
            files.check(spec)

    def test_rotary_buffers_of_old_checkpoints_are_ignored_and_noted(self, llama, tmp_path):
        """Old releases of transformers saved inv_freq; it is computed from config.json."""
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        files, spec = self.saved_with(llama, tmp_path, lambda t: t.update({name: torch.ones(4)}))
        files.check(spec)
        assert files.notes == [f"{name} is ignored: it is computed from config.json"]

    def test_a_stored_tied_head_is_accepted_when_bit_equal(self, llama, tmp_path):
        """Saved twice, still one tensor: NaN bits included."""

        def change(tensors):
            tensors["model.embed_tokens.weight"][3, 3] = torch.nan
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

        files, spec = self.saved_with(llama, tmp_path, change)
        files.check(spec)
        assert len(files.notes) == 1 and "lm_head.weight is ignored" in files.notes[0]

    def test_a_stored_tied_head_that_diverged_is_refused(self, llama, tmp_path):
        """Dropping it would change the model; the message says which setting trains both."""

        def change(tensors):
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors["lm_head.weight"][-1, -1] += 1e-3

        files, spec = self.saved_with(llama, tmp_path, change)
        with pytest.raises(ValueError, match="lm_head.weight differs .* set tie_word_embeddings to false"):
            files.check(spec)

    def test_a_missing_head_of_an_untied_model_is_refused(self, hf_model, saved):
        """A checkpoint of a tied model under a config that does not tie: the head would be noise."""
        hf_model.config.tie_word_embeddings = False
        spec = describe_model(hf_model.config)
        files = WeightFiles(saved)
        if "lm_head.weight" in files.keys():
            files.check(spec)
        else:
            with pytest.raises(ValueError, match="lm_head.weight is missing"):
                files.check(spec)


class TestLoadBlockSlice:
    @pytest.mark.parametrize("num_actors", [1, 3])
    def test_masters_are_exactly_the_stored_values(self, hf_config, hf_model, saved, num_actors):
        """fp32 weights survive in (hi, lo) bit for bit, whatever the cut; padding is zero."""
        files = WeightFiles(saved)
        state = hf_model.state_dict()
        for block in describe_model(hf_config).blocks:
            hi, lo = load_block(files, block, "bf16", num_actors)
            master = join_master(hi, lo)
            covered = torch.zeros(block.numel, dtype=torch.bool)
            for p in block.params:
                covered[p.offset : p.offset + p.numel] = True
            assert all(torch.equal(view, state[name]) for name, view in flat_views(block, master).items())
            assert not hi[~covered].any() and not lo[~covered].any()

    @pytest.mark.parametrize("num_actors", [1, 3])
    def test_fp32_holds_the_masters_themselves(self, hf_config, hf_model, saved, num_actors):
        """With fp32 compute, hi is the master."""
        files = WeightFiles(saved)
        for block in describe_model(hf_config).blocks:
            hi, _ = load_block(files, block, "fp32", num_actors)
            assert all(torch.equal(v, hf_model.state_dict()[n]) for n, v in flat_views(block, hi).items())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_checkpoints_give_exact_masters(self, hf_config, hf_model, tmp_path, dtype):
        """fp16 has more mantissa than bf16 and less range: its values are kept whole; bf16 needs hi alone."""
        hf_model.to(dtype).save_pretrained(tmp_path)
        block = describe_model(hf_config).decoder[0]
        hi, lo = load_block(WeightFiles(tmp_path), block, "bf16")
        for name, view in flat_views(block, join_master(hi, lo)).items():
            assert torch.equal(view, hf_model.state_dict()[name].float())
        assert (dtype == torch.bfloat16) == (not lo.any())

    def test_without_masters_hi_is_rounded_to_nearest(self, hf_config, hf_model, saved):
        """Frozen parameters have no master: the GPU reads what a bf16 load of the checkpoint would give."""
        block = describe_model(hf_config, frozen=["model.layers.1.*"]).decoder[1]
        assert block.trainable_numel == 0
        hi = torch.empty(block.numel, dtype=torch.bfloat16)
        load_block_slice(WeightFiles(saved), block, 0, block.numel, hi, None, "bf16")
        for name, view in flat_views(block, hi).items():
            assert torch.equal(view, hf_model.state_dict()[name].bfloat16())


class TestInitBlockSlice:
    def init(self, config, block, num_actors=1, precision="fp32", seed=3):
        hi = torch.full((block.numel,), torch.nan, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[precision])
        lo = torch.full((block.numel,), 77, dtype=torch.int16) if precision == "bf16" else None
        for k in range(num_actors):
            a, b = slice_of(block.numel, k, num_actors)
            init_block_slice(config, block, a, b, hi[a:b], None if lo is None else lo[a:b], precision, seed)
        return hi, lo

    @pytest.mark.parametrize("num_actors", [2, 5])
    def test_the_cut_does_not_matter(self, hf_config, num_actors):
        """A value depends on the seed, the name and the element: 1, 2 and 5 owners make one model."""
        for block in describe_model(hf_config).blocks:
            assert torch.equal(self.init(hf_config, block)[0], self.init(hf_config, block, num_actors)[0])

    def test_values_are_those_of_a_fresh_model(self, hf_config):
        """normal(0, initializer_range) matrices, norms of ones, zero biases, zero padding."""
        for block in describe_model(hf_config).blocks:
            hi, _ = self.init(hf_config, block)
            for name, view in flat_views(block, hi).items():
                if name.endswith(".bias"):
                    assert not view.any()
                elif view.ndim == 1:
                    assert (view == 1).all()
                else:
                    assert view.std() == pytest.approx(hf_config.initializer_range, rel=0.1)
                    assert view.mean().abs() < 0.1 * hf_config.initializer_range
            assert int(hi.isfinite().sum()) == block.numel

    def test_seeds_and_names_give_other_values(self, hf_config):
        """Two layers, two matrices of one shape, two chunks and two seeds are independent."""
        spec = describe_model(hf_config)
        views = flat_views(spec.decoder[0], self.init(hf_config, spec.decoder[0])[0])
        gate, up = (views[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        other = self.init(hf_config, spec.decoder[1])[0]
        assert not torch.equal(gate, up)
        assert not torch.equal(gate.flatten()[:257], gate.flatten()[257:514])
        assert not torch.equal(self.init(hf_config, spec.decoder[0])[0], other)
        assert not torch.equal(self.init(hf_config, spec.decoder[1], seed=4)[0], other)

    def test_bf16_masters_are_rounded(self, hf_config):
        """As if a bf16 checkpoint had been loaded: the remainder is zero and hi is the fp32 draw, rounded."""
        block = describe_model(hf_config).decoder[0]
        hi, lo = self.init(hf_config, block, precision="bf16")
        assert not lo.any() and torch.equal(hi, self.init(hf_config, block)[0].bfloat16())


class TestSaveModel:
    def save(self, model, out, source, shard_bytes=1 << 30, dtype=torch.float32):
        state = model.state_dict()
        save_model(out, describe_model(model.config), lambda name: state[name], source, shard_bytes, dtype)

    @pytest.mark.parametrize("shard_bytes", [40_000, 1 << 30])
    def test_transformers_reloads_it_equal(self, hf_model, saved, tmp_path, shard_bytes):
        """Sharded or not, from_pretrained gives the same state dict, with nothing missing or left over."""
        self.save(hf_model, tmp_path / "out", saved, shard_bytes=shard_bytes)
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        assert hf_model.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(a, model.state_dict()[name]) for name, a in hf_model.state_dict().items())

    def test_the_key_set_is_that_of_transformers(self, hf_model, saved, tmp_path):
        """A tied head is saved once, under the embedding's name; no wrapper's segment in any key."""
        self.save(hf_model, tmp_path / "out", saved)
        hf_model.save_pretrained(tmp_path / "theirs")
        ours, theirs = (load_file(tmp_path / d / "model.safetensors") for d in ("out", "theirs"))
        assert ours.keys() == theirs.keys()

    def test_shards_respect_their_size_and_the_index(self, hf_model, saved, tmp_path):
        """Only a tensor larger than a shard exceeds it; WeightFiles accepts index and headers; sizes add up."""
        self.save(hf_model, tmp_path / "out", saved, shard_bytes=15_000)
        shards = sorted((tmp_path / "out").glob("model-*-of-*.safetensors"))
        assert len(shards) > 3 and not (tmp_path / "out" / "model.safetensors").exists()
        for shard in shards:
            tensors = load_file(shard)
            assert sum(t.nbytes for t in tensors.values()) <= 15_000 or len(tensors) == 1
        index = json.loads((tmp_path / "out" / INDEX).read_text())
        assert index["metadata"]["total_size"] == 4 * hf_model.num_parameters()
        WeightFiles(tmp_path / "out").check(describe_model(hf_model.config))

    def test_one_tensor_is_asked_for_at_a_time_and_once(self, hf_model, saved, tmp_path):
        """The extra memory of a save is one tensor: the one before is given up when the next is asked for."""
        given: list[tuple[str, weakref.ref]] = []

        def tensors(name):
            assert all(ref() is None for _, ref in given)
            tensor = hf_model.state_dict()[name].clone()
            given.append((name, weakref.ref(tensor)))
            return tensor

        save_model(tmp_path / "out", describe_model(hf_model.config), tensors, saved, 15_000, torch.float32)
        assert sorted(name for name, _ in given) == sorted(name for name, _ in hf_model.named_parameters())

    def test_other_files_are_copied_byte_for_byte(self, llama, tmp_path):
        """config.json, generation_config.json and the tokenizer's files are the source's own bytes; weights are not."""
        source = tmp_path / "source"
        llama.save_pretrained(source)
        (source / "tokenizer.json").write_bytes(b'{ "any":  "bytes" }\n')
        (source / "pytorch_model.bin").write_bytes(b"old")
        self.save(llama, tmp_path / "out", source)
        names = {p.name for p in (tmp_path / "out").iterdir()}
        assert names == {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
        for name in names - {"model.safetensors"}:
            assert (source / name).read_bytes() == (tmp_path / "out" / name).read_bytes()

    @pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
    def test_a_new_dtype_changes_that_key_alone(self, llama, tmp_path, key):
        """bf16 weights of an fp32 source: the config says so, under the key it used, and nothing else moves."""
        llama.save_pretrained(tmp_path / "source")
        config = json.loads((tmp_path / "source" / "config.json").read_text())
        config[key] = config.pop("dtype")
        (tmp_path / "source" / "config.json").write_text(json.dumps(config))
        self.save(llama, tmp_path / "out", tmp_path / "source", dtype=torch.bfloat16)
        assert json.loads((tmp_path / "out" / "config.json").read_text()) == config | {key: "bfloat16"}
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert model.dtype == torch.bfloat16
        assert all(torch.equal(a.bfloat16(), b) for a, b in zip(llama.parameters(), model.parameters(), strict=True))

    def test_the_source_may_be_a_config_file(self, llama, tmp_path):
        """A randomly initialised model has nothing else."""
        llama.config.save_pretrained(tmp_path / "source")
        self.save(llama, tmp_path / "out", tmp_path / "source" / "config.json")
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").num_parameters() == llama.num_parameters()

    def test_a_directory_with_weights_is_refused(self, llama, tmp_path):
        """Old shards beside new ones would load as a mixture."""
        llama.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="already holds model.safetensors; give an empty directory"):
            self.save(llama, tmp_path, tmp_path)

    def test_every_file_is_on_the_disk_when_it_returns(self, hf_model, saved, tmp_path, monkeypatch):
        """One fsync a file, and one of the directory last."""
        synced = []
        fsync = os.fsync

        def record(fd):
            synced.append(os.readlink(f"/proc/self/fd/{fd}"))
            fsync(fd)

        monkeypatch.setattr(os, "fsync", record)
        self.save(hf_model, tmp_path / "out", saved, shard_bytes=40_000)
        assert set(synced) == {str(p) for p in (tmp_path / "out").iterdir()} | {str(tmp_path / "out")}
        assert synced[-1] == str(tmp_path / "out")
