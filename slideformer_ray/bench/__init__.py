"""`slideformer-ray bench`: step time, speed and memory of a model shape on this machine, with random weights."""
