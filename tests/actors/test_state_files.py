"""Optimizer states on disk: any cut into pieces is read by any other cut, and a bad directory is refused by name."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from slideformer_ray.actors.state_files import StateError, StateReader, StateWriter

NUMEL = 100
EXP_AVG = torch.arange(NUMEL, dtype=torch.float32) / 7
LO = torch.arange(NUMEL, dtype=torch.int16) - 50
NAME = "model.layers.0.mlp.up_proj.weight"


def write(directory, cuts, adam_step="5", name=NAME):
    """One file an actor, as AdamShard writes them; `cuts` are the elements where one actor's piece ends."""
    edges = [0, *cuts, NUMEL]
    for k, (a, b) in enumerate(zip(edges, edges[1:], strict=False)):
        writer = StateWriter(directory, f"actor-{k}", {"adam_step": adam_step})
        writer.write("layer.0", {("exp_avg", name, a): EXP_AVG[a:b], ("lo", name, a): LO[a:b]})
        assert writer.names == [f"actor-{k}.layer.0.safetensors"]


def read(reader, state, first, last, dtype=torch.float32, name=NAME):
    out = torch.full((last - first,), -1, dtype=dtype)
    reader.read(state, name, first, last, out)
    return out


@pytest.mark.parametrize("cuts", [(), (1,), (33, 66), (10, 11, 99)], ids=str)
def test_any_cut_is_read_by_any_other(tmp_path, cuts):
    """Elements and dtypes come back exactly, whoever wrote them and whoever asks."""
    write(tmp_path, cuts)
    reader = StateReader(tmp_path)
    for first, last in [(0, NUMEL), (0, 1), (32, 67), (10, 11), (99, NUMEL), (50, 50)]:
        assert torch.equal(read(reader, "exp_avg", first, last), EXP_AVG[first:last])
        assert torch.equal(read(reader, "lo", first, last, torch.int16), LO[first:last])


def test_adams_step_is_restored(tmp_path):
    write(tmp_path, (50,), adam_step="1234")
    assert StateReader(tmp_path).adam_step == 1234


def test_files_are_plain_safetensors(tmp_path):
    """Anyone can read them: the key says state, parameter and first element."""
    write(tmp_path, (40,))
    tensors = load_file(tmp_path / "actor-1.layer.0.safetensors")
    assert set(tensors) == {f"exp_avg|{NAME}|40", f"lo|{NAME}|40"}


@pytest.mark.parametrize("keep", [0, 4, 100, -1], ids=["empty", "within length", "within header", "last byte gone"])
def test_a_torn_file_is_refused_by_name(tmp_path, keep):
    """Wherever it was cut, and before a single state is filled."""
    write(tmp_path, (50,))
    torn = tmp_path / "actor-1.layer.0.safetensors"
    torn.write_bytes(torn.read_bytes()[:keep])
    with pytest.raises(StateError, match=r"actor-1.layer.0.safetensors: not a readable state file .* torn"):
        StateReader(tmp_path)


def test_a_foreign_file_is_refused_by_name(tmp_path):
    """Safetensors, but not ours: keys without an element."""
    write(tmp_path, ())
    (tmp_path / "actor-0.layer.0.safetensors").rename(tmp_path / "model.safetensors")
    save_file({"lm_head.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(StateError, match="model.safetensors: not a readable state file"):
        StateReader(tmp_path)


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(StateError, match=r"no state files .*; resume from a directory RUN/checkpoints/step-N"):
        StateReader(tmp_path)


def test_files_of_several_saves_are_refused(tmp_path):
    """One actor's file of step 5 beside another's of step 6: a mixture that no run ever was."""
    write(tmp_path, (50,), adam_step="5")
    writer = StateWriter(tmp_path, "actor-1", {"adam_step": "6"})
    writer.write("layer.0", {("exp_avg", NAME, 50): EXP_AVG[50:]})
    with pytest.raises(StateError, match=r"its files are of several saves \(Adam steps \['5', '6'\]\)"):
        StateReader(tmp_path)


@pytest.mark.parametrize("lost", ["actor-0.layer.0", "actor-1.layer.0", "actor-2.layer.0"])
def test_a_lost_piece_is_refused(tmp_path, lost):
    """No hole is ever left as zeros: the error says state, parameter and where the states end."""
    write(tmp_path, (30, 60))
    (tmp_path / f"{lost}.safetensors").unlink()
    ends = {"actor-0.layer.0": 0, "actor-1.layer.0": 30, "actor-2.layer.0": 60}[lost]
    with pytest.raises(StateError, match=f"exp_avg of {NAME} ends at element {ends}, needed up to {NUMEL}"):
        read(StateReader(tmp_path), "exp_avg", 0, NUMEL)


def test_states_of_another_model_are_refused(tmp_path):
    """A parameter that the checkpoint does not have, and one that is longer here."""
    write(tmp_path, ())
    reader = StateReader(tmp_path)
    with pytest.raises(StateError, match="exp_avg of lm_head.weight ends at element 0"):
        read(reader, "exp_avg", 0, 5, name="lm_head.weight")
    with pytest.raises(StateError, match=f"ends at element {NUMEL}, needed up to 128"):
        read(reader, "exp_avg", 0, 128)


def test_states_of_another_dtype_are_refused(tmp_path):
    """Never converted in silence (field case 23): exp_avg asked for as bf16, kept as fp32."""
    write(tmp_path, ())
    with pytest.raises(StateError, match=r"is torch.float32, expected torch.bfloat16; training.precision differs"):
        read(StateReader(tmp_path), "exp_avg", 0, NUMEL, torch.bfloat16)
