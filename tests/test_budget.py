"""budget.py, machine.py, shortfalls.py: what a run allocates, what is refused, and with which advice."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slideformer_ray.budget import GPU, PINNED, PRIVATE, DoesNotFit, resolve
from slideformer_ray.checkpoint_layout import buffer_bytes
from slideformer_ray.config import GIB, ConfigError, RunConfig
from slideformer_ray.machine import Machine, disk_free, physical_cores, readable
from slideformer_ray.memory.host_limits import HostLimits
from slideformer_ray.model.layers import describe_model
from slideformer_ray.model.shapes import shape
from slideformer_ray.schedule import StepShape, build_step
from slideformer_ray.shortfalls import check_disk

PARAMETERS_7B = 7_615_616_512


@pytest.fixture(scope="module")
def qwen_7b():
    hf_config = shape("qwen2.5-7b")
    return describe_model(hf_config), hf_config.intermediate_size


def machine(gpu_gib=24, ram_gib=128, shm_gib=None, cores=16):
    """gpu_gib None: no GPU."""
    ram, shm = int(ram_gib * GIB), int((ram_gib if shm_gib is None else shm_gib) * GIB)
    gpu = None if gpu_gib is None else int(gpu_gib * GIB)
    return Machine(HostLimits(ram, ram, None, 0, shm, shm), cores, gpu and "a GPU", gpu, gpu)


def config_of(**sections):
    """32 rows of 1024 tokens a step, in micro-batches of 4."""
    values = {
        "run_dir": "run",
        "model": {"path": "model"},
        "data": {"train": ["none.jsonl"], "seq_len": 1024},
        "training": {"steps": 1, "rows_per_step": 32, "micro_batch_rows": 4},
    }
    for section, fields in sections.items():
        values[section] = {**values.get(section, {}), **fields}
    return RunConfig.from_dict(values)


def plan_of(model, host=None, **sections):
    return resolve(config_of(**sections), *model, host or machine())


def refusal_of(model, host=None, **sections):
    with pytest.raises(DoesNotFit) as caught:
        plan_of(model, host, **sections)
    return caught.value


def bytes_of(plan, words):
    (item,) = [item for item in plan.items if words in item.what]
    return item.nbytes


# ------------------------------------------------------------------------------------------------------ a known machine


def test_a_7b_model_on_24_gb_and_128_gb(qwen_7b):
    """12 bytes a parameter in host memory and 2 for the gradients that clipping holds, to a permille of padding."""
    plan = plan_of(qwen_7b)
    for words, each in (("(hi)", 2), ("(lo)", 2), ("exp_avg", 8), ("gradients:", 2)):
        assert bytes_of(plan, words) == pytest.approx(each * PARAMETERS_7B, rel=1e-3), words
    assert plan.total(PINNED) == pytest.approx(4 * PARAMETERS_7B, rel=5e-3)
    assert plan.host_bytes < 110 * GIB and plan.gpu_bytes < 24 * GIB
    assert (plan.layout.num_optimizer_actors, plan.layout.threads_per_optimizer_actor) == (2, 7)
    assert plan.layout.gradient_slots == 28
    # Every layer's input and the head's, of 8 micro-batches: nothing is left to travel.
    assert (plan.layout.activation_slots, plan.layout.num_host_cells) == (29 * 8, 0)
    assert plan.disk_bytes == pytest.approx(12 * PARAMETERS_7B, rel=1e-3)
    assert plan.model_bytes == 2 * PARAMETERS_7B


def test_the_items_are_the_buffers(qwen_7b):
    """Pinned items add up to the shared buffers."""
    plan = plan_of(qwen_7b, training={"micro_batch_rows": 32})
    shared = sum(plan.layout.buffers(qwen_7b[0]).values())
    assert plan.total(PINNED) == shared
    assert plan.store_bytes > shared
    assert plan.total(GPU) + plan.total(PINNED) + plan.total(PRIVATE) == sum(item.nbytes for item in plan.items)


def test_fp32_has_masters_that_the_gpu_reads(qwen_7b):
    """No remainders; 4 bytes where bf16 has 2 and 2."""
    plan = plan_of(qwen_7b, machine(48, 256), training={"precision": "fp32"})
    assert not any("(lo)" in item.what for item in plan.items)
    assert bytes_of(plan, "fp32 masters") == pytest.approx(4 * PARAMETERS_7B, rel=1e-3)


def test_frozen_parameters_have_neither_gradients_nor_states():
    """Of a layer, only what is trained costs 10 private bytes and a gradient."""
    hf_config = shape("qwen2.5-7b")
    spec = describe_model(hf_config, frozen=("model.embed_tokens.*", "lm_head.*"))
    trained = sum(p.numel for b in spec.blocks for p in b.params if not p.frozen)
    plan = plan_of((spec, hf_config.intermediate_size))
    assert bytes_of(plan, "exp_avg") == pytest.approx(8 * trained, rel=1e-3)
    assert "grad.embed" not in plan.layout.buffers(spec)


def test_the_cpu_device_takes_everything_from_host_memory(qwen_7b):
    """The compute actor's units and activations are then private memory; no tier is called GPU."""
    plan = plan_of(qwen_7b, machine(None, 256))
    assert plan.gpu_bytes == 0 and plan.gpu_limit is None
    assert bytes_of(plan, "3 parameter units") > GIB
    assert plan.layout.device == "cpu" and plan.layout.num_host_cells == 0


# --------------------------------------------------------------------------------------------------- what was left open


@pytest.mark.parametrize(
    "cores, given, chosen",
    [(2, {}, (1, 1)), (6, {}, (1, 4)), (8, {}, (2, 3)), (16, {"num_optimizer_actors": 4}, (4, 3)),
     (16, {"threads_per_optimizer_actor": 2}, (2, 2))],
)  # fmt: skip
def test_actors_and_threads_follow_the_cores(qwen_7b, cores, given, chosen):
    """Two cores are left to driver and GPU actor; what the user gives stays."""
    layout = plan_of(qwen_7b, machine(cores=cores), placement=given).layout
    assert (layout.num_optimizer_actors, layout.threads_per_optimizer_actor) == chosen


def test_activations_stay_on_the_gpu_as_far_as_it_reaches(qwen_7b):
    """A smaller GPU keeps fewer; the rest have cells in pinned memory; the GPU's limit is kept and well used."""
    layouts = []
    for gib in (24, 14, 12, 10):
        plan = plan_of(qwen_7b, machine(gib))
        slot = plan.layout.cell_numel * 2
        assert plan.gpu_limit - slot < plan.gpu_bytes <= plan.gpu_limit or plan.layout.num_host_cells == 0
        assert bytes_of(plan, "offloaded activations") == plan.layout.num_host_cells * slot
        layouts.append(plan.layout)
    slots, cells = [x.activation_slots for x in layouts], [x.num_host_cells for x in layouts]
    assert slots == sorted(slots, reverse=True) and cells == sorted(cells)
    assert cells[-1] > 0


def test_without_clipping_gradient_slots_give_way_to_the_ram(qwen_7b):
    """One a layer where there is room, else fewer, down to two."""
    free = {"optimizer": {"max_grad_norm": None}}
    roomy = plan_of(qwen_7b, machine(ram_gib=128), **free)
    tight = plan_of(qwen_7b, machine(ram_gib=roomy.host_bytes / GIB - 4), **free)
    assert roomy.layout.gradient_slots == 28
    assert 2 <= tight.layout.gradient_slots < 28
    slot = qwen_7b[0].largest_decoder_numel * 2
    assert tight.host_limit - slot < tight.host_bytes <= tight.host_limit


def test_without_clipping_gradient_slots_give_way_to_dev_shm(qwen_7b):
    """They are shared memory."""
    plan = plan_of(qwen_7b, machine(shm_gib=30), optimizer={"max_grad_norm": None})
    assert plan.layout.gradient_slots < 28 and plan.store_bytes <= 30 * GIB


def test_the_user_s_counts_are_kept(qwen_7b):
    """Units and slots as given; more activation slots than there are cells are of no use."""
    given = {"param_units": 4, "gradient_units": 1, "gradient_slots": 28, "activation_slots": 12}
    layout = plan_of(qwen_7b, placement=given).layout
    assert {key: getattr(layout, key) for key in given} == given
    assert plan_of(qwen_7b, placement={"activation_slots": 9999}).layout.activation_slots == 29 * 8


@pytest.mark.parametrize("num_layers", [1, 3, 8])
@pytest.mark.parametrize("slots", [3, 4, 7, 20])
@pytest.mark.parametrize("frozen", [0, 2])
def test_the_largest_step_needs_the_most_host_cells(num_layers, slots, frozen):
    """Steps with fewer micro-batches and evaluations share its cells, so the plan looks at no other step."""
    trainable = tuple(i >= frozen for i in range(num_layers + 2))

    def cells(num_micro_batches, train):
        counts = {"gradient_slots": num_layers, "activation_slots": slots}
        return build_step(
            StepShape(num_layers, num_micro_batches, trainable, False, train=train, **counts)
        ).num_host_cells

    training = [cells(m, True) for m in range(1, 7)]
    assert training == sorted(training)
    assert max(cells(m, False) for m in range(1, 7)) <= training[-1]


def test_rows_of_data_are_counted_where_there_are_files(qwen_7b, tmp_path):
    """The driver holds them. 20,000 rows of 100 bytes: 2.5 bytes a byte and 1.5 KiB a row; a missing file counts 0."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "%s"}\n' % ("x" * 86) * 20_000)
    plan = plan_of(qwen_7b, data={"train": [str(path)]})
    assert bytes_of(plan, "rows of the data files") == pytest.approx(20_000 * (250 + 1536), rel=0.02)
    assert bytes_of(plan_of(qwen_7b), "rows of the data files") == 0


def test_a_save_takes_its_buffers_for_a_moment(qwen_7b):
    """Each actor's, whatever the model (field case 35)."""
    assert plan_of(qwen_7b).save_peak_bytes == 0
    plan = plan_of(qwen_7b, checkpoint={"save_every": 10})
    assert plan.save_peak_bytes == buffer_bytes(plan.layout.num_optimizer_actors) < 128 << 20
    assert plan_of(qwen_7b, checkpoint={"resume": "auto"}).save_peak_bytes == plan.save_peak_bytes


def test_threads_of_one_process_need_neither_ray_nor_dev_shm(qwen_7b):
    """LocalTiers: a machine without /dev/shm will do."""
    host = machine(shm_gib=0)
    local = resolve(config_of(), *qwen_7b, host, local=True)
    assert bytes_of(local, "one process") < bytes_of(plan_of(qwen_7b), "processes and Ray")
    with pytest.raises(DoesNotFit, match="/dev/shm"):
        resolve(config_of(), *qwen_7b, host)


def test_a_given_cluster_s_store_is_its_own(qwen_7b):
    """What is free in /dev/shm says nothing of a store that is running."""
    plan_of(qwen_7b, machine(shm_gib=1), placement={"address": "auto"})


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_refusal_names_the_shortfall_and_brings_the_bytes(qwen_7b):
    """Needed, found, short; the plan that does not fit is there for a table."""
    error = refusal_of(qwen_7b, machine(ram_gib=64, shm_gib=64))
    (line,) = error.shortfalls
    need, found, short = (float(x) for x in re.findall(r"([\d.]+) GiB", line)[:3])
    assert line.startswith("host memory: this run needs ") and "available RAM is 64.00 GiB" in line
    assert found == 64 and short == pytest.approx(need - found, abs=0.01)
    assert error.plan.host_bytes / GIB == pytest.approx(need, abs=0.01)
    assert "no setting mends that" in line


def test_fewer_rows_a_step_are_offered_where_activations_are_host_memory(qwen_7b):
    """On the CPU device every micro-batch's activations are; the number of rows that is offered fits."""
    host = machine(None, ram_gib=160)
    (line,) = refusal_of(qwen_7b, host, training={"rows_per_step": 100_000}).shortfalls
    offered = int(re.search(r"lower training.rows_per_step from 100000 to (\d+)", line)[1])
    assert 1 <= offered < 100_000
    plan_of(qwen_7b, host, training={"rows_per_step": offered, "micro_batch_rows": min(4, offered)})


def test_fewer_optimizer_actors_are_offered_where_their_processes_are_too_much(qwen_7b):
    """Each is a process of its own; the number that is offered fits."""
    host = machine(ram_gib=150, shm_gib=150)
    (line,) = refusal_of(qwen_7b, host, placement={"num_optimizer_actors": 500}).shortfalls
    offered = int(re.search(r"lower placement.num_optimizer_actors from 500 to (\d+)", line)[1])
    assert 1 <= offered < 500
    plan_of(qwen_7b, host, placement={"num_optimizer_actors": offered})


def test_every_tier_that_is_too_small_is_named_at_once(qwen_7b):
    """GPU, RAM and /dev/shm, each with its own line, so that a user need not find them one by one."""
    error = refusal_of(qwen_7b, machine(gpu_gib=6, ram_gib=64, shm_gib=16))
    assert [re.split(": | has ", line)[0] for line in error.shortfalls] == ["GPU memory", "host memory", "/dev/shm"]
    assert "sudo mount -o remount,size=" in error.shortfalls[2]


def test_the_micro_batch_that_is_offered_is_the_largest_that_fits(qwen_7b):
    """A setting is tried out before it is offered."""
    host = machine(gpu_gib=12)
    (line,) = refusal_of(qwen_7b, host, training={"micro_batch_rows": 32}).shortfalls
    rows = int(re.search(r"lower training.micro_batch_rows from 32 to (\d+)", line)[1])
    plan_of(qwen_7b, host, training={"micro_batch_rows": rows})
    refusal_of(qwen_7b, host, training={"micro_batch_rows": rows + 1})


def test_a_row_too_long_for_the_gpu_is_to_be_shortened(qwen_7b):
    """Where not even one row fits."""
    host, data = machine(gpu_gib=12, ram_gib=512), {"seq_len": 65536}
    (line,) = refusal_of(qwen_7b, host, data=data, training={"rows_per_step": 4}).shortfalls
    seq_len = int(re.search(r"micro_batch_rows to 1 and data.seq_len from 65536 to (\d+)", line)[1])
    plan_of(qwen_7b, host, data={"seq_len": seq_len}, training={"rows_per_step": 4, "micro_batch_rows": 1})


def test_a_gpu_too_small_for_the_units_is_said_to_be(qwen_7b):
    """No batch mends that."""
    (line,) = refusal_of(qwen_7b, machine(gpu_gib=6)).shortfalls
    assert "not even one short row fits" in line


def test_too_many_activation_slots_are_to_be_left_to_the_plan(qwen_7b):
    """The user's number does not fit, the default does."""
    (line,) = refusal_of(qwen_7b, machine(gpu_gib=12), placement={"activation_slots": 232}).shortfalls
    assert "leave placement.activation_slots out" in line


def test_what_the_gpu_has_left_saves_recomputation(qwen_7b):
    """Attention of the last layers first, then gate and up, never more than the budget; all of it on a large GPU."""
    found = []
    for gib in (14, 24, 40, 140):
        plan = plan_of(qwen_7b, machine(gib))
        layout = plan.layout
        assert plan.gpu_bytes <= plan.gpu_limit
        assert bool(layout.kept_gate_up) <= (layout.kept_attention == 28)
        found.append((layout.kept_attention, layout.kept_gate_up))
    assert found == sorted(found) and found[0] == (0, 0) and found[-1] == (28, 28)
    assert 0 < found[1][0] < 28


def test_activations_that_travel_leave_no_room_to_keep_more(qwen_7b):
    """A slot for every activation comes first."""
    layout = plan_of(qwen_7b, machine(12)).layout
    assert layout.num_host_cells and (layout.kept_attention, layout.kept_gate_up) == (0, 0)


def test_layers_without_a_backward_keep_nothing():
    """Below the lowest trained layer."""
    hf_config = shape("qwen2.5-7b")
    frozen = ["model.embed_tokens.*", *(f"model.layers.{i}.*" for i in range(20))]
    layout = plan_of((describe_model(hf_config, frozen), hf_config.intermediate_size), machine(140)).layout
    assert (layout.kept_attention, layout.kept_gate_up) == (8, 8)


@pytest.mark.parametrize(
    "placement, training",
    [({"layers": "compiled"}, {}), ({"device": "cpu"}, {}), ({}, {"precision": "fp32"}), ({}, {"deterministic": True})],
)
def test_where_less_is_known_less_is_kept(qwen_7b, placement, training):
    """Autograd's own layers keep nothing here, and fp32 and deterministic attention record more than is counted."""
    layout = plan_of(qwen_7b, machine(200, 256), placement=placement, training=training).layout
    assert (layout.kept_attention, layout.kept_gate_up) == (0, 28 if training else 0)


def test_keeping_more_than_fits_is_refused(qwen_7b):
    """The user's number stays a demand; the plan's own fits."""
    (line,) = refusal_of(qwen_7b, placement={"kept_attention": 28}).shortfalls
    assert "leave placement.kept_attention out, and as many are taken as fit" in line
    with pytest.raises(ConfigError, match="kept_attention and placement.kept_gate_up are for layers that are written"):
        plan_of(qwen_7b, placement={"kept_gate_up": 2, "layers": "plain"})


@pytest.mark.parametrize(
    "sections, short_gib, advice",
    [
        ({}, 5, "set optimizer.max_grad_norm to null"),
        ({"checkpoint": {"save_every": 5}}, 0.01, "set checkpoint.save_every to 0"),
        (
            {"placement": {"gradient_slots": 28}, "optimizer": {"max_grad_norm": None}},
            5,
            "leave placement.gradient_slots out",
        ),
        (
            {"training": {"micro_batch_rows": 32, "rows_per_step": 256}, "budget": {"gpu_gib": 20}},
            5,
            "lower training.rows_per_step",
        ),
    ],
)
def test_host_memory_is_mended_by_settings_that_were_tried(qwen_7b, sections, short_gib, advice):
    """Each on a machine that has so much less than the run needs."""
    plan = plan_of(qwen_7b, machine(ram_gib=1024), **sections)
    ram_gib = (plan.host_bytes + plan.save_peak_bytes) / GIB - short_gib
    (line,) = refusal_of(qwen_7b, machine(ram_gib=ram_gib, shm_gib=1024), **sections).shortfalls
    assert advice in line


def test_a_budget_is_raised_only_as_far_as_the_machine_reaches(qwen_7b):
    """To what the run needs, and not on a machine that has no more."""
    (line,) = refusal_of(qwen_7b, budget={"ram_gib": 100}).shortfalls
    enough = float(re.search(r"raise budget.ram_gib to ([\d.]+)", line)[1])
    plan_of(qwen_7b, budget={"ram_gib": enough})
    (line,) = refusal_of(qwen_7b, machine(ram_gib=64, shm_gib=64), budget={"ram_gib": 60}).shortfalls
    assert "budget.ram_gib is 60.00 GiB" in line and "raise budget.ram_gib" not in line


def test_a_cgroup_s_limit_is_a_ceiling(qwen_7b):
    """What it has in use already does not count as free."""
    host = machine(ram_gib=256)
    limits = dataclasses.replace(host.limits, cgroup_limit=100 * GIB, cgroup_used=40 * GIB)
    (line,) = refusal_of(qwen_7b, dataclasses.replace(host, limits=limits)).shortfalls
    assert "what the cgroup's limit leaves is 60.00 GiB" in line


def test_clipping_with_too_few_slots_is_a_contradiction(qwen_7b):
    """A ConfigError that names both settings."""
    with pytest.raises(ConfigError, match=r"gradient_slots is 3; max_grad_norm holds .* all 28 trained layers"):
        plan_of(qwen_7b, placement={"gradient_slots": 3})


def test_cuda_without_a_gpu_is_refused(qwen_7b):
    """`device: auto` would take the CPU, without a word; cuda was asked for."""
    with pytest.raises(ConfigError, match="placement.device is cuda and PyTorch finds no GPU"):
        plan_of(qwen_7b, machine(None), placement={"device": "cuda"})


def test_a_disk_too_small_is_refused(qwen_7b, tmp_path, monkeypatch):
    """Before the first step and not after the last: the final model, and a checkpoint more than are kept (field case
    51), for an old one goes only when the new one is complete."""
    config = config_of(checkpoint={"save_every": 1}, training={"steps": 9}).model_copy(
        update={"run_dir": tmp_path / "run"}
    )
    plan = resolve(config, *qwen_7b, machine())
    assert disk_free(tmp_path / "not" / "yet") > 0
    need = 3 * plan.disk_bytes + plan.model_bytes
    monkeypatch.setattr("slideformer_ray.shortfalls.disk_free", lambda path: need)
    check_disk(config, plan)
    monkeypatch.setattr("slideformer_ray.shortfalls.disk_free", lambda path: need - 1)
    with pytest.raises(
        ConfigError,
        match=rf"run_dir: the disk of .*run has .* {readable(need)} are needed for up to 3 checkpoints and ",
    ):
        check_disk(config, plan)
    monkeypatch.setattr("slideformer_ray.shortfalls.disk_free", lambda path: plan.model_bytes - 1)
    without = config.changed(["checkpoint.save_every=0"])
    with pytest.raises(ConfigError, match="are needed for the final model; free space, give another run_dir$"):
        check_disk(without, plan)


# ------------------------------------------------------------------------------------------------------------- machines


def test_another_machine_can_be_pretended():
    """`plan --gpu-gib --ram-gib --cores`: /dev/shm is half the RAM, as Linux makes it; what is not given stays."""
    here = machine(gpu_gib=None, ram_gib=8, cores=2)
    other = here.like(gpu_gib=24, ram_gib=64, cores=8)
    assert (other.gpu_free_bytes, other.physical_cores) == (24 * GIB, 8)
    assert (other.limits.ram_available, other.limits.shm_free, other.limits.cgroup_limit) == (64 * GIB, 32 * GIB, None)
    assert here.like() == here


def test_this_machine_is_read():
    """Cores that this process may use, and memory that is there."""
    found = Machine.read("cpu")
    assert found.gpu_bytes is None
    assert 1 <= found.physical_cores == physical_cores()
    assert 0 < found.limits.ram_available <= found.limits.ram_total


def test_sizes_are_readable():
    """In the largest unit that fits."""
    assert [readable(n) for n in (0, 4096, 3 << 19, 13 * GIB // 10)] == ["0 bytes", "4.00 KiB", "1.50 MiB", "1.30 GiB"]


def test_a_plan_starts_nothing(tmp_path):
    """Neither Ray nor a weight file nor a large allocation: 7.6e9 parameters are planned in a few hundred MB."""
    code = """
import json, re, sys
from pathlib import Path
from slideformer_ray.budget import resolve
from slideformer_ray.config import RunConfig
from slideformer_ray.machine import Machine
from slideformer_ray.model.layers import describe_model, load_hf_config
from slideformer_ray.model.shapes import write_shape
path = write_shape("qwen2.5-7b", Path(sys.argv[1]))
config = RunConfig(run_dir="run", model={"path": path}, data={"train": "none"}, training={"steps": 1})
hf_config = load_hf_config(path)
machine = Machine.read("cpu").like(gpu_gib=24, ram_gib=256)
resolve(config, describe_model(hf_config), hf_config.intermediate_size, machine)
# Not ru_maxrss, which begins at what the parent had.
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
print(json.dumps({"ray": "ray" in sys.modules, "peak": peak}))
"""
    root = Path(__file__).resolve().parent.parent
    run = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=root, stdout=subprocess.PIPE, check=True)
    found = json.loads(run.stdout)
    assert found["ray"] is False
    assert found["peak"] < GIB
