"""gpu_sensors.py: numbers where the driver's library answers, none where it does not."""

import pytest
import torch

from slideformer_ray.observe.gpu_sensors import read_gpu_sensors

CUDA = torch.device("cuda", 0)


def test_the_cpu_has_none():
    """Nothing is asked."""
    assert read_gpu_sensors(torch.device("cpu")) == {}


def test_numbers_are_passed_on(monkeypatch):
    """Under names with their units."""
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 97)
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 61)
    assert read_gpu_sensors(CUDA) == {"utilisation_percent": 97.0, "temperature_celsius": 61.0}


@pytest.mark.parametrize("error", [ModuleNotFoundError("pynvml"), RuntimeError("NVML is not initialised")])
def test_without_the_library_there_are_none(monkeypatch, error):
    """A figure less, never a run less."""

    def fail(device):
        raise error

    monkeypatch.setattr(torch.cuda, "utilization", fail)
    assert read_gpu_sensors(CUDA) == {}


@pytest.mark.gpu
def test_a_gpu_answers_with_numbers_that_can_be():
    """Or, without pynvml, with nothing."""
    found = read_gpu_sensors(torch.device("cuda", torch.cuda.current_device()))
    assert found == {} or (0 <= found["utilisation_percent"] <= 100 and 0 < found["temperature_celsius"] < 120)
