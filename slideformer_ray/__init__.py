"""Full-parameter fine-tuning of language models on one workstation GPU: SlideFormer (arXiv 2603.16428) on Ray.

The sources of `slideformer_ray.actors` and `slideformer_ray.kernels` stand at the root of the checkout, because
transformers imports whatever package is called `kernels` on sys.path. In a wheel setuptools' `package-dir` puts them
under this package; in a checkout the lines below find them. Neither folder has an `__init__.py`.
"""

import pathlib

__version__ = "0.1.0"

_checkout = pathlib.Path(__file__).resolve().parent.parent
if (_checkout / "actors" / "gpu_actor.py").exists() and (_checkout / "kernels" / "layer_adam.py").exists():
    __path__.append(str(_checkout))


def __getattr__(name):
    # Imported on first use: `import slideformer_ray.schedule` must need neither torch nor ray.
    if name == "Trainer":
        from slideformer_ray.trainer import Trainer

        return Trainer
    if name == "RunConfig":
        from slideformer_ray.config import RunConfig

        return RunConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
