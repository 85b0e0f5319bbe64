"""Field case 35: LlamaFactory #4782.

In: the last save of an offloaded run.
Bad: killed while everything is gathered.
Good: saving streams; extra memory is the buffers that `plan` names, far below the state that is saved.
"""

import threading

from pipeline import make_config, open_tiers, save, save_small_model
from transformers import LlamaConfig

from slideformer_ray.checkpoint_layout import buffer_bytes

MIB = 1 << 20
SLACK = 16 * MIB  # Python's own, and what glibc holds


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_save_takes_its_buffers_and_no_more(tmp_path):
    """Some 250 MiB of states, watched while they are written: one actor's four buffers of 8 MiB."""
    source = save_small_model(tmp_path / "model", "llama")
    shape = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 6}
    LlamaConfig.from_pretrained(source, **shape, head_dim=128).save_pretrained(source)
    config = make_config(source, precision="bf16", model__random_init=True)
    with open_tiers(config, load=False) as tiers:
        tiers.load_weights(None)
        peak, end = resident_bytes(), threading.Event()
        before = peak

        def watch():
            nonlocal peak
            while not end.wait(1e-3):
                peak = max(peak, resident_bytes())

        thread = threading.Thread(target=watch)
        thread.start()
        path = save(tiers, config, 1)
        end.set()
        thread.join()
    assert sum(file.stat().st_size for file in path.rglob("*.safetensors")) > 200 * MIB
    assert peak - before <= buffer_bytes(1) + SLACK
