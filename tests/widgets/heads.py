"""Readings of two small networks, without a network: maps whose values are known, some of them not there."""

import numpy as np

from lumen_lab.distillation.head_readings import LEVELS, HeadReadings, NetworkReading, StageReading

SIZE = (96, 128)
SHAPES = {4: (3, 4), 3: (6, 8), 2: (12, 16), 1: (24, 32)}


def stage_of(level, draw, student):
    """Gate g = what is drawn; gated = features · g; the mask without the stage is a constant."""
    shape = SHAPES[level]
    features = draw.normal(size=(5, *shape)).astype(np.float32)
    values = {"features": features, "without": np.full(SIZE, level / 10, np.float32)}
    if level > 1:
        gate = draw.uniform(size=shape).astype(np.float32)
        values |= {"gate": gate, "gated": features * gate}
        values |= {name: draw.uniform(size=shape).astype(np.float32) for name in ("side", "gradient")}
    if student:
        counts = np.zeros(256, int)
        counts[10 : 10 + 20 * level] = np.arange(1, 20 * level + 1)
        values |= {"error": np.square(draw.normal(size=shape)).astype(np.float32), "codes": {"features": counts}}
    return StageReading(level, **values)


def network_of(name, seed):
    draw = np.random.default_rng(seed)
    mask = draw.uniform(size=SIZE).astype(np.float32)
    return NetworkReading(name, mask, tuple(stage_of(level, draw, name == "student") for level in LEVELS))


def readings(student=True):
    """Teacher and student, or the teacher alone."""
    image = np.random.default_rng(9).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
    return HeadReadings(image, network_of("teacher", 0), network_of("student", 1) if student else None)
