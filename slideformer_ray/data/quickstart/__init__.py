"""What `slideformer-ray quickstart` trains: a 1.0M parameter Llama and 4,000 chat rows (2.8 MB in the package).

The model was trained on public-domain text and knows nothing of the task; the rows ask for definitions and are made
from WordNet 3.0 glosses (WORDNET_LICENSE). 100 steps take the held-out loss from 7.08 to 4.60, in seconds on two cores.
Imports neither torch nor ray. Tested by tests/data/test_quickstart.py.
"""

from __future__ import annotations

from pathlib import Path

from slideformer_ray.config import DataSection, ModelSection, OptimizerSection, RunConfig, TrainingSection

# A user message that is answered before and after the training. No row asks for this word.
QUICKSTART_PROMPT = "Define: surgeon"

_FOLDER = Path(__file__).resolve().parent


def quickstart_model_dir() -> Path:
    """A Hugging Face model directory, with tokenizer and chat template. Positions: 256."""
    return _FOLDER / "tiny-llama"


def quickstart_data() -> Path:
    """A JSONL of 4,000 `messages` rows: a question and an answer, at most 63 tokens together."""
    return _FOLDER / "define.jsonl"


def quickstart_config(run_dir: Path | str) -> RunConfig:
    """100 steps of 16 rows, 200 of the 4,000 held out.

    The rate is high because the model is tiny; it, the warm-up and the shape are the best of a small grid in plain
    PyTorch. The seed gives a held-out part about as hard as the whole (7.08 and 7.09 before training; others to 7.17).
    """
    return RunConfig(
        run_dir=Path(run_dir),
        model=ModelSection(path=quickstart_model_dir()),
        data=DataSection(train=(quickstart_data(),), eval_rows=200, seq_len=64, pad_to_multiple=16),
        optimizer=OptimizerSection(learning_rate=5e-3, schedule="linear", warmup_steps=20),
        training=TrainingSection(steps=100, rows_per_step=16, micro_batch_rows=8, seed=1, eval_every=25),
    )
