"""Bring a network onto the NPU: compile it with Qualcomm's compiler, run it in the emulation, read what it became."""
