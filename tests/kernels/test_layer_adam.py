"""kernels/layer_adam.py against torch.optim.AdamW(fused=True), bit for bit, on every backend and instruction set here.

The ground truth is PyTorch's optimizer on fp32 masters, padded to whole vectors of 16: then all elements pass through
its vector loop. Without padding it rounds exp_avg_sq of the last numel % 8 elements differently (see
test_unpadded_torch_differs_in_its_remainder_only).
"""

import ctypes
import functools
import mmap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slideformer_ray.kernels import layer_adam
from slideformer_ray.kernels.layer_adam import AdamHyper, LayerAdam, join_master, split_master, thread_slices

PATHS = [("native", "avx512"), ("native", "avx2"), ("native", "portable"), ("torch", "auto")]
HYPER = AdamHyper(lr=3e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=1)

# PyTorch's build without fused multiply-adds, and its builds for other machines, may round differently.
torch_fuses = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="bit-equality with torch is stated for its AVX2 and AVX-512 builds",
)


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread():
    """torch's threads spin at each barrier; on a busy machine that takes longer than these small updates."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make_adam(backend, isa, num_threads=1, **options):
    try:
        return LayerAdam(num_threads, backend=backend, isa=isa, **options)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(params=PATHS, ids=["-".join(path) for path in PATHS])
def path(request):
    make_adam(*request.param).close()
    return request.param


def at_step(hyper, step, **changes):
    return AdamHyper(**{**vars(hyper), "step": step, **changes})


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_same_bits(found, expected):
    different = (bits(found) != bits(expected)).nonzero().flatten().tolist()
    assert not different, f"{len(different)} of {found.numel()} elements differ, first {different[:5]}"


class SplitState:
    """What an optimizer actor holds for a slice: (hi, lo) of the given master weights, and zero moments."""

    def __init__(self, master):
        self.hi = torch.empty(master.numel(), dtype=torch.bfloat16)
        self.lo = torch.empty(master.numel(), dtype=torch.int16)
        split_master(master, self.hi, self.lo)
        self.exp_avg = torch.zeros(master.numel())
        self.exp_avg_sq = torch.zeros(master.numel())

    @property
    def tensors(self):
        return self.hi, self.lo, self.exp_avg, self.exp_avg_sq

    def clone(self):
        copy = object.__new__(SplitState)
        vars(copy).update({name: tensor.clone() for name, tensor in vars(self).items()})
        return copy

    def step(self, adam, grad, hyper, begin=0, end=None):
        part = slice(begin, end)
        adam.step_split(*(tensor[part] for tensor in self.tensors), grad[part], hyper)


class TorchAdamW:
    """torch.optim.AdamW(fused=True) on the same master weights; `padded` to whole vectors: the ground truth."""

    def __init__(self, master, hyper, padded=True):
        self.numel = master.numel()
        self.padding = -self.numel % 16 if padded else 0
        self.param = torch.nn.functional.pad(master, (0, self.padding)).requires_grad_()
        betas = (hyper.beta1, hyper.beta2)
        options = {"lr": hyper.lr, "betas": betas, "eps": hyper.eps, "weight_decay": hyper.weight_decay}
        self.optimizer = torch.optim.AdamW([self.param], fused=True, **options)

    def step(self, grad, grad_scale=1.0):
        scaled = grad.float() * torch.tensor(grad_scale, dtype=torch.float32)
        self.param.grad = torch.nn.functional.pad(scaled, (0, self.padding))
        self.optimizer.step()

    @property
    def master(self):
        return self.param.detach()[: self.numel]

    @property
    def exp_avg(self):
        return self.optimizer.state[self.param]["exp_avg"][: self.numel]

    @property
    def exp_avg_sq(self):
        return self.optimizer.state[self.param]["exp_avg_sq"][: self.numel]


def assert_equals_torch(state, reference):
    assert_same_bits(join_master(state.hi, state.lo), reference.master)
    assert_same_bits(state.exp_avg, reference.exp_avg)
    assert_same_bits(state.exp_avg_sq, reference.exp_avg_sq)


def random_master(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 0.02


@functools.lru_cache(maxsize=16)
def random_grad(numel, seed):
    """bf16 gradients over the magnitudes of a training run, 1e-8 to 1, a tenth of them zero."""
    generator = torch.Generator().manual_seed(1000 + seed)
    magnitude = 10 ** (torch.rand(numel, generator=generator) * 8 - 8)
    kept = torch.rand(numel, generator=generator) > 0.1
    return (torch.randn(numel, generator=generator) * magnitude * kept).bfloat16()


# --- split master weights -------------------------------------------------------------------------------------------


def split(master):
    hi, lo = torch.empty(master.numel(), dtype=torch.bfloat16), torch.empty(master.numel(), dtype=torch.int16)
    split_master(master, hi, lo)
    return hi, lo


@pytest.mark.parametrize("upper", [0x0000, 0x0001, 0x3F80, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0xBF80, 0xFF80, 0xFFFF])
def test_split_is_exact_for_every_low_half(upper):
    """All 65,536 lower halves under an upper half come back: zeros, denormals, largest numbers, infinities, NaNs."""
    unsigned = (upper << 16) + torch.arange(1 << 16)
    master = (unsigned - ((unsigned >> 31) << 32)).to(torch.int32).view(torch.float32)
    assert_same_bits(join_master(*split(master)), master)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=67))
def test_split_follows_its_definition_and_is_exact(patterns):
    """hi = (u + 0x8000) >> 16 and lo = u & 0xffff for any bits u, and (hi << 16) + sign_extend(lo) is u again."""
    master = torch.frombuffer((ctypes.c_uint32 * len(patterns))(*patterns), dtype=torch.float32)
    hi, lo = split(master)
    assert [half & 0xFFFF for half in bits(hi).tolist()] == [((u + 0x8000) >> 16) & 0xFFFF for u in patterns]
    assert [half & 0xFFFF for half in lo.tolist()] == [u & 0xFFFF for u in patterns]
    assert [u & 0xFFFFFFFF for u in bits(join_master(hi, lo)).tolist()] == patterns


def test_hi_is_the_master_rounded_to_bf16():
    """hi is what the GPU computes with: the nearest bf16 of the master, except that a tie goes away from zero."""
    master = random_master(100_000)
    hi, lo = split(master)
    no_tie = lo != -0x8000
    assert no_tie.sum() > 99_000
    assert_same_bits(hi[no_tie], master.bfloat16()[no_tie])


def test_split_and_join_of_more_than_one_chunk():
    """Conversion goes by chunks of 2^20 elements; none is left out and the last is a short one."""
    master = random_master(layer_adam.CHUNK + 3)
    assert_same_bits(join_master(*split(master)), master)


# --- the step against PyTorch ---------------------------------------------------------------------------------------


@torch_fuses
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_100_steps_equal_torch(path, weight_decay):
    """100 steps of an odd-sized layer on three threads leave the bits that torch's fused AdamW leaves."""
    numel = 2 * layer_adam.MIN_ELEMENTS_PER_THREAD + 4 * 47 * 31 + 13
    hyper = at_step(HYPER, 1, weight_decay=weight_decay)
    master = random_master(numel)
    state, reference = SplitState(master), TorchAdamW(master, hyper)
    adam = make_adam(*path, num_threads=3)
    for step in range(1, 101):
        grad = random_grad(numel, step % 7)
        state.step(adam, grad, at_step(hyper, step))
        reference.step(grad)
    adam.close()
    assert_equals_torch(state, reference)


@torch_fuses
def test_every_tail_length_equals_torch(path):
    """Sizes 1 to 131 (every remainder of 8, 16 and 64) equal torch's vector loop in every element."""
    adam = make_adam(*path)
    for numel in range(1, 132):
        master = random_master(numel, seed=numel)
        state, reference = SplitState(master), TorchAdamW(master, HYPER)
        for step in (1, 2, 3):
            grad = random_grad(numel, step)
            state.step(adam, grad, at_step(HYPER, step))
            reference.step(grad)
        assert_equals_torch(state, reference)


@torch_fuses
@pytest.mark.parametrize("numel", [7, 15, 157, 100_003])
def test_unpadded_torch_differs_in_its_remainder_only(path, numel):
    """Against torch's optimizer as users run it, two steps leave the same bits, except in the last numel % 8 elements:
    torch's remainder loop fuses `beta2 * exp_avg_sq` into its addition, its vector loop the other product, so that
    exp_avg_sq there is within one unit in the last place, and the parameter within the rounding of its update."""
    master = random_master(numel)
    state, reference = SplitState(master), TorchAdamW(master, HYPER, padded=False)
    adam = make_adam(*path)
    for step in (1, 2):
        grad = random_grad(numel, step)
        state.step(adam, grad, at_step(HYPER, step))
        reference.step(grad)
    updated = join_master(state.hi, state.lo)
    vectors, remainder = slice(0, numel - numel % 8), slice(numel - numel % 8, numel)
    assert_same_bits(state.exp_avg, reference.exp_avg)
    assert_same_bits(state.exp_avg_sq[vectors], reference.exp_avg_sq[vectors])
    assert_same_bits(updated[vectors], reference.master[vectors])
    assert (bits(state.exp_avg_sq[remainder]) - bits(reference.exp_avg_sq[remainder])).abs().max() <= 1
    torch.testing.assert_close(updated[remainder], reference.master[remainder], rtol=2**-23, atol=HYPER.lr * 2**-22)


@torch_fuses
@pytest.mark.parametrize("betas", [(0.0, 0.99), (0.3, 0.9), (0.5, 0.95), (0.95, 0.0), (0.9, 0.95)])
def test_betas_equal_torch(path, betas):
    """Below and at beta1 = 0.5 torch's lerp starts from the gradient; bits agree there too, and for betas of 0."""
    hyper = at_step(HYPER, 1, beta1=betas[0], beta2=betas[1])
    master = random_master(1003)
    state, reference = SplitState(master), TorchAdamW(master, hyper)
    adam = make_adam(*path)
    for step in range(1, 21):
        grad = random_grad(1003, step)
        state.step(adam, grad, at_step(hyper, step))
        reference.step(grad)
    assert_equals_torch(state, reference)


@torch_fuses
def test_grad_scale_multiplies_the_fp32_gradient(path):
    """A clip coefficient gives torch's bits for the fp32 gradient times the fp32 coefficient; grad is only read."""
    master = random_master(1003)
    state, reference = SplitState(master), TorchAdamW(master, HYPER)
    adam = make_adam(*path)
    for step, grad_scale in enumerate((0.3, 1 / 3, 1.0, 7e-4), start=1):
        grad = random_grad(1003, step)
        untouched = grad.clone()
        state.step(adam, grad, at_step(HYPER, step, grad_scale=grad_scale))
        assert_same_bits(grad, untouched)
        reference.step(grad, grad_scale)
    assert_equals_torch(state, reference)


@torch_fuses
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_fp32_mode_equals_torch(path, weight_decay):
    """`precision: fp32` keeps the parameter whole and takes an fp32 gradient; 100 steps leave torch's bits."""
    numel = layer_adam.MIN_ELEMENTS_PER_THREAD + 4 * 47 * 31 + 5
    hyper = at_step(HYPER, 1, weight_decay=weight_decay)
    param, exp_avg, exp_avg_sq = random_master(numel), torch.zeros(numel), torch.zeros(numel)
    reference = TorchAdamW(param.clone(), hyper)
    adam = make_adam(*path, num_threads=2)
    for step in range(1, 101):
        grad = random_grad(numel, step % 5).float() * 1.7
        adam.step_fp32(param, exp_avg, exp_avg_sq, grad, at_step(hyper, step, grad_scale=0.9))
        reference.step(grad, 0.9)
    adam.close()
    assert_same_bits(param, reference.master)
    assert_same_bits(exp_avg, reference.exp_avg)
    assert_same_bits(exp_avg_sq, reference.exp_avg_sq)


@torch_fuses
def test_all_options_at_once_equal_torch(path):
    """Slices, threads, clipping, decay, a schedule and a small beta1 together, over two chunks of the fallback."""
    numel = layer_adam.CHUNK + 4 * 47 * 31 + 1
    master = random_master(numel)
    hyper = at_step(HYPER, 1, beta1=0.4)
    state, reference = SplitState(master), TorchAdamW(master, hyper)
    adam = make_adam(*path, num_threads=3)
    for step in range(1, 4):
        grad = random_grad(numel, step)
        scheduled = at_step(hyper, step, lr=1e-3 / step, grad_scale=0.5 / step)
        state.step(adam, grad, scheduled, 0, 77_777)
        state.step(adam, grad, scheduled, 77_777, numel)
        reference.optimizer.param_groups[0]["lr"] = scheduled.lr
        reference.step(grad, scheduled.grad_scale)
    adam.close()
    assert_equals_torch(state, reference)


# --- bits do not depend on how the work is cut ----------------------------------------------------------------------


def test_a_slice_leaves_the_rest_untouched(path):
    """Updating [a, b) of a bigger buffer writes nothing outside it, and inside what the whole-buffer update writes."""
    numel, begin, end = 1000, 123, 789
    before = SplitState(random_master(numel))
    grad = random_grad(numel, 1)
    adam = make_adam(*path)
    whole, part = before.clone(), before.clone()
    whole.step(adam, grad, HYPER)
    part.step(adam, grad, HYPER, begin, end)
    for updated, old, expected in zip(part.tensors, before.tensors, whole.tensors, strict=True):
        assert_same_bits(updated[begin:end], expected[begin:end])
        assert_same_bits(updated[:begin], old[:begin])
        assert_same_bits(updated[end:], old[end:])


@pytest.mark.parametrize("num_slices", [2, 3, 7])
def test_slices_of_any_number_give_the_same_bits(path, num_slices):
    """K optimizer actors own one slice of a layer each; any K leaves the same state."""
    numel = 5003
    cuts = [numel * index // num_slices for index in range(num_slices + 1)]
    adam = make_adam(*path)
    whole, sliced = SplitState(random_master(numel)), SplitState(random_master(numel))
    for step in (1, 2, 3):
        grad = random_grad(numel, step)
        whole.step(adam, grad, at_step(HYPER, step))
        for begin, end in zip(cuts, cuts[1:], strict=False):
            sliced.step(adam, grad, at_step(HYPER, step), begin, end)
    for found, expected in zip(sliced.tensors, whole.tensors, strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("fp32", [False, True])
def test_segments_update_their_elements_alone(path, fp32, num_threads):
    """Rows of an embedding: elements inside the segments get the bits of a whole step, the others keep theirs; the rest
    updated afterwards makes the whole step. Many segments, short and long, cut between threads anywhere."""
    numel = 3 * layer_adam.MIN_ELEMENTS_PER_THREAD + 501
    rng = np.random.default_rng(0)
    bounds = np.unique(rng.integers(0, numel + 1, 400)).astype(np.int64)
    chosen = np.ascontiguousarray(bounds[: len(bounds) // 2 * 2].reshape(-1, 2))
    rest = np.ascontiguousarray(np.concatenate([[0], chosen.ravel(), [numel]]).reshape(-1, 2))
    rest = np.ascontiguousarray(rest[rest[:, 0] < rest[:, 1]])
    inside = torch.zeros(numel, dtype=torch.bool)
    for begin, end in chosen.tolist():
        inside[begin:end] = True
    adam = make_adam(*path, num_threads=num_threads)
    grad = random_grad(numel, 1)
    whole, parts = SplitState(random_master(numel)), SplitState(random_master(numel))
    before = [tensor.clone() for tensor in parts.tensors]

    def step(state, segments=None):
        if fp32:
            param, _, m, v = state.tensors
            adam.step_fp32(param, m, v, grad.float(), HYPER, segments)
        else:
            adam.step_split(*state.tensors, grad, HYPER, segments)

    if fp32:
        for state in (whole, parts):
            state.hi = random_master(numel)
        before[0] = parts.hi.clone()
    step(whole)
    step(parts, chosen)
    for found, full, old in zip(parts.tensors, whole.tensors, before, strict=True):
        assert_same_bits(found[inside], full[inside])
        assert_same_bits(found[~inside], old[~inside])
    step(parts, rest)
    for found, full in zip(parts.tensors, whole.tensors, strict=True):
        assert_same_bits(found, full)
    adam.close()


@pytest.mark.parametrize("segments", [[[5, 3]], [[0, 5], [4, 8]], [[-1, 2]], [[0, 101]]])
def test_segments_out_of_order_or_range_are_refused(path, segments):
    """A wrong segment would write into another layer's memory."""
    state = SplitState(random_master(100))
    with pytest.raises(ValueError, match="in order, disjoint and within"):
        make_adam(*path).step_split(*state.tensors, random_grad(100, 1), HYPER, np.array(segments, np.int64))


def test_no_segment_is_no_work(path):
    """An actor whose slice holds none of the rows."""
    state = SplitState(random_master(100))
    before = [tensor.clone() for tensor in state.tensors]
    make_adam(*path).step_split(*state.tensors, random_grad(100, 1), HYPER, np.empty((0, 2), np.int64))
    for found, old in zip(state.tensors, before, strict=True):
        assert_same_bits(found, old)


@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_threads_give_the_same_bits(num_threads):
    """The number of threads is a matter of speed only."""
    numel = num_threads * layer_adam.MIN_ELEMENTS_PER_THREAD + 77
    grad = random_grad(numel, 1)
    alone, together = SplitState(random_master(numel)), SplitState(random_master(numel))
    alone.step(make_adam("native", "auto"), grad, HYPER)
    adam = make_adam("native", "auto", num_threads=num_threads)
    assert len(thread_slices(numel, num_threads)) == num_threads
    together.step(adam, grad, HYPER)
    adam.close()
    for found, expected in zip(together.tensors, alone.tensors, strict=True):
        assert_same_bits(found, expected)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_instruction_sets_agree_on_any_bits(data):
    """Portable, AVX2 and AVX-512 agree on any inputs: denormals, infinities and NaNs (whose payload may differ)."""
    numel = data.draw(st.integers(1, 131))
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    raw = torch.randint(-(2**31), 2**31, (5, numel), generator=rng, dtype=torch.int64).to(torch.int32)
    start = SplitState(raw[0].view(torch.float32))
    start.exp_avg, start.exp_avg_sq = raw[1].view(torch.float32), raw[2].view(torch.float32).abs()
    grad = raw[3].to(torch.int16).view(torch.bfloat16)
    results = []
    for isa in ("portable", "avx2", "avx512"):
        if make_adam("native", "portable")._library.layer_adam_isa_supported(layer_adam.ISA_CODES[isa]):
            state = start.clone()
            state.step(make_adam("native", isa), grad, at_step(HYPER, 3, grad_scale=0.7))
            results.append((join_master(state.hi, state.lo), state.exp_avg, state.exp_avg_sq))
    for other in results[1:]:
        for found, expected in zip(other, results[0], strict=True):
            assert torch.equal(found.isnan(), expected.isnan())
            assert_same_bits(
                found.nan_to_num(7.0, float("inf"), -float("inf")),
                expected.nan_to_num(7.0, float("inf"), -float("inf")),
            )


@pytest.mark.parametrize("numel", [0, 1, 63, 65536, 65537, 10**6, 2**31 - 1, 2**31 + 9, 2**40 + 1])
@pytest.mark.parametrize("num_threads", [1, 2, 7, 64])
def test_thread_slices_cover_every_element_once(numel, num_threads):
    """Slices adjoin, begin on cache lines, are at most one a thread, and none but the last is small."""
    slices = thread_slices(numel, num_threads)
    assert [begin for begin, _ in slices] + [numel] == [0] * bool(slices) + [end for _, end in slices] or numel == 0
    assert len(slices) <= num_threads
    assert all(begin % layer_adam.SLICE_ALIGNMENT == 0 for begin, _ in slices)
    assert all(end - begin >= layer_adam.MIN_ELEMENTS_PER_THREAD for begin, end in slices[:-1])


def reserve(numel, dtype):
    """A tensor of zeros that is address space only: a page takes memory when it is written."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.12; Linux's value
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize, flags), dtype=dtype)


@pytest.mark.parametrize("boundary", [2**30, 2**31, 2**32])
@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_elements_around_large_indices(isa, boundary):
    """Elements on both sides of index 2^30, 2^31 and 2^32 get their bits and their neighbours stay untouched: indices
    and byte offsets are 64-bit. (The indices go to the native function itself; a tensor slice would begin at 0.)"""
    adam = make_adam("native", isa)
    begin, end, margin = boundary - 71, boundary + 73, 64
    window = slice(begin - margin, end + margin)
    dtypes = (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.bfloat16)
    arrays = [reserve(end + margin, dtype) for dtype in dtypes]
    small = SplitState(random_master(end - begin + 2 * margin))
    grad = random_grad(end - begin + 2 * margin, 1)
    for array, source in zip(arrays, (*small.tensors, grad), strict=True):
        array[window] = source

    coefficients = layer_adam._Coefficients.of(HYPER, False)
    addresses = [array.data_ptr() for array in arrays]
    segments = np.array([[begin, end]], np.int64)
    isa_code = layer_adam.ISA_CODES[isa]
    adam._library.layer_adam_split(isa_code, ctypes.byref(coefficients), segments.ctypes.data, 1, *addresses)
    small.step(adam, grad, HYPER, margin, margin + end - begin)
    for array, expected in zip(arrays, (*small.tensors, grad), strict=True):
        assert_same_bits(array[window], expected)


# --- special values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lr_0_changes_no_bit_of_a_parameter(path, weight_decay):
    """With lr 0 (first step of a warm-up) a parameter keeps every bit, also of -0.0, denormals and infinities."""
    special = [0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0, 3e38, float("inf"), -float("inf")]
    master = torch.cat([torch.tensor(special * 20), random_master(1000)])
    before = SplitState(master)
    adam = make_adam(*path)
    after = before.clone()
    for step in (1, 2):
        after.step(adam, random_grad(master.numel(), step), at_step(HYPER, step, lr=0.0, weight_decay=weight_decay))
    assert_same_bits(after.hi, before.hi)
    assert_same_bits(after.lo, before.lo)
    assert after.exp_avg.abs().max() > 0

    param = master.clone()
    adam.step_fp32(
        param, torch.zeros_like(param), torch.zeros_like(param), -torch.ones_like(param), at_step(HYPER, 1, lr=0.0)
    )
    assert_same_bits(param, master)


def test_a_non_finite_gradient_reaches_its_parameter_alone(path):
    """NaN and Inf gradients are not hidden, and spoil their own elements only."""
    state = SplitState(random_master(100))
    grad = random_grad(100, 1).clone()
    grad[13], grad[77] = float("nan"), float("inf")
    bits(grad)[42] = 0x7FFF  # the NaN that CUDA makes; one more and it would be a zero
    state.step(make_adam(*path), grad, HYPER)
    for tensor in (join_master(state.hi, state.lo), state.hi):
        assert tensor.isnan().nonzero().flatten().tolist() == [13, 42, 77]


@torch_fuses
def test_denormals_are_kept_by_default(path):
    """Moments below 1.2e-38 keep torch's bits, even where the calling thread flushes denormals."""
    master = random_master(200)
    state, reference = SplitState(master), TorchAdamW(master, HYPER)
    adam = make_adam(*path)
    for step in range(1, 6):
        grad = (random_grad(200, step).float() * 1e-37).bfloat16()
        reference.step(grad)
        state.step(adam, grad, at_step(HYPER, step))
    assert ((state.exp_avg != 0) & (state.exp_avg.abs() < torch.finfo(torch.float32).tiny)).any()
    assert_equals_torch(state, reference)


@pytest.mark.parametrize("callers_mode", [False, True])
@pytest.mark.parametrize("flush_denormals", [False, True])
def test_denormal_mode_is_the_option_and_is_restored(callers_mode, flush_denormals):
    """`flush_denormals` decides, not the calling thread's mode, which is as before when the step returns."""
    adam = make_adam("native", "auto", flush_denormals=flush_denormals)
    denormal = torch.tensor([1e-39])
    exp_avg = denormal.clone()
    if "no effect" in adam.reason or not torch.set_flush_denormal(callers_mode):
        pytest.skip("this machine cannot flush denormals")
    try:
        adam.step_fp32(torch.ones(1), exp_avg, torch.zeros(1), torch.zeros(1), HYPER)
        callers_mode_after = bits(denormal * 0.9).item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert (bits(exp_avg).item() == 0) == flush_denormals
    assert callers_mode_after == callers_mode


def test_no_elements_is_no_work(path):
    """A slice of no elements (more actors than a small layer has cache lines) is legal."""
    SplitState(torch.empty(0)).step(make_adam(*path), torch.empty(0, dtype=torch.bfloat16), HYPER)


# --- choice of backend, and errors ----------------------------------------------------------------------------------


def test_auto_takes_the_widest_instruction_set():
    """Without wishes the native backend runs on the widest instruction set, and says where the library came from."""
    adam = make_adam("native", "auto")
    supported = [isa for isa, code in layer_adam.ISA_CODES.items() if adam._library.layer_adam_isa_supported(code)]
    assert adam.isa == supported[-1] and adam.backend == "native"
    assert adam.isa in adam.reason and ".so" in adam.reason


def test_without_a_library_auto_is_torch_and_says_why(monkeypatch):
    """No compiled library: the fallback is used, and `reason` carries the cause."""
    monkeypatch.setattr(layer_adam, "_native_library", lambda: (None, "no C compiler"))
    adam = LayerAdam(1)
    assert (adam.backend, adam.isa) == ("torch", "torch")
    assert "no compiled layer_adam: torch fallback" in adam.reason and "no C compiler" in adam.reason


@pytest.mark.parametrize("wish", [{"backend": "native"}, {"isa": "portable"}])
def test_native_by_name_without_a_library_is_an_error(monkeypatch, wish):
    """What was asked for by name is not replaced: the error gives the cause and the fix."""
    monkeypatch.setattr(layer_adam, "_native_library", lambda: (None, "no C compiler"))
    with pytest.raises(ValueError, match="no C compiler.*python -m slideformer_ray.kernels.native_build"):
        LayerAdam(1, **wish)


def test_an_instruction_set_that_the_cpu_lacks_is_an_error(monkeypatch):
    """The error lists what this CPU has."""

    class PortableOnly:
        def layer_adam_isa_supported(self, code):
            return code == layer_adam.ISA_CODES["portable"]

    monkeypatch.setattr(layer_adam, "_native_library", lambda: (PortableOnly(), "test"))
    with pytest.raises(ValueError, match="isa='avx512', but this CPU has portable"):
        LayerAdam(1, isa="avx512")


def test_flushing_without_effect_is_said():
    """The torch fallback cannot flush denormals on its threads; an ignored option is reported."""
    assert "flush_denormals has no effect" in LayerAdam(1, backend="torch", flush_denormals=True).reason


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_threads": 0},
        {"num_threads": 1, "backend": "cuda"},
        {"num_threads": 1, "isa": "sse"},
        {"num_threads": 1, "backend": "torch", "isa": "avx2"},
    ],
)
def test_a_wrong_argument_is_named(arguments):
    """An impossible wish is a ValueError that names the argument."""
    with pytest.raises(ValueError, match="num_threads|backend|isa"):
        LayerAdam(**arguments)


@pytest.mark.parametrize(
    "change", [{"lr": -1e-3}, {"lr": float("nan")}, {"beta1": 1.0}, {"beta2": -0.1}, {"eps": -1.0}, {"step": 0}]
)
def test_hyper_parameters_out_of_range_are_named(change):
    """Ranges are checked where they are declared; the message names the field and the value found."""
    with pytest.raises(ValueError, match=f"AdamHyper.{next(iter(change))} is "):
        AdamHyper(**{**vars(HYPER), **change})


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("hi", torch.zeros(8, dtype=torch.float16)),
        ("lo", torch.zeros(7, dtype=torch.int16)),
        ("exp_avg", torch.zeros(8, dtype=torch.bfloat16)),
        ("exp_avg_sq", torch.zeros(16)[::2]),
        ("grad", torch.zeros((2, 4), dtype=torch.bfloat16)),
        ("grad", torch.zeros(8, dtype=torch.bfloat16, device="meta")),
    ],
)
def test_a_wrong_tensor_is_named(path, name, replacement):
    """The native code trusts addresses, so a tensor of another dtype, size, layout or device never reaches it."""
    names = ("hi", "lo", "exp_avg", "exp_avg_sq")
    tensors = {**dict(zip(names, SplitState(torch.ones(8)).tensors, strict=True)), "grad": torch.zeros(8).bfloat16()}
    with pytest.raises(ValueError, match=f"layer_adam: {name} "):
        make_adam(*path).step_split(**{**tensors, name: replacement}, hyper=HYPER)
