"""`python -m slideformer_ray` is the command slideformer-ray."""

from slideformer_ray.cli import app

app()
