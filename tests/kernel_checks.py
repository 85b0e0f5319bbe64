"""What the tests of the Triton kernels share: inputs, and the comparison with a ground truth in float64."""

import torch

# Relative error of a whole tensor, by ||found - true|| / ||true||. Results are rounded once or twice, to 2^-24, 2^-11
# and 2^-8; Triton's interpreter cuts off where a GPU rounds, which is twice as far.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random(*shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def relative_error(found, truth):
    return ((found.double().cpu() - truth.cpu()).norm() / truth.norm().cpu()).item()


def assert_close(found, truth, names):
    """Every tensor of `found` (the dtype under test) against `truth` (float64)."""
    errors = {name: relative_error(f, t) for name, f, t in zip(names, found, truth, strict=True)}
    limits = {name: TOLERANCE[f.dtype] for name, f in zip(names, found, strict=True)}
    assert all(errors[name] < limits[name] for name in names), f"relative errors {errors}, limits {limits}"


def with_gradients(function, inputs, grad_seed=1):
    """[outputs..., gradients...] of `function` at `inputs`, for a fixed random gradient of each output."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [random(*o.shape, dtype=torch.float32, seed=grad_seed + i) for i, o in enumerate(outputs)]
    # Gradients have the dtype of the results under test in both precisions: rounded here, exact in float64.
    grads = [g.bfloat16().to(o.device, o.dtype) for g, o in zip(grads, outputs, strict=True)]
    return [o.detach() for o in outputs] + list(torch.autograd.grad(outputs, leaves, grads))
