"""Program that drives Qualcomm's compiler or its emulation; run in a process of its own, with one JSON file.

Stands alone (standard library, numpy, onnxruntime) so that it starts quickly and its memory is the compiler's. What it
finds goes to the ``result`` file that the request names; everything printed is the log.
"""

import json
import os
import sys
import time
import traceback


def session_options(provider_options, config, log_severity):
    """Session options on the QNN provider with the HTP backend (the x86 build compiles and emulates)."""
    import onnxruntime
    import onnxruntime_qnn

    onnxruntime.register_execution_provider_library("QNN", onnxruntime_qnn.get_library_path())
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == "QNN"]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = log_severity
    options.add_provider_for_devices(devices, {"backend_path": onnxruntime_qnn.get_qnn_htp_path(), **provider_options})
    for key, value in config.items():
        options.add_session_config_entry(key, value)
    return options


def compile_context(request):
    """Build the context file; creating the session is the whole of the compile.

    The compiler writes its schematic into the working directory, which is therefore the one that the request names.
    """
    import onnxruntime

    os.chdir(request["folder"])
    options = session_options(request["provider_options"], request["config"], 0)
    started = time.perf_counter()
    onnxruntime.InferenceSession(request["model"], options)
    return {"compile_s": time.perf_counter() - started, "peak_memory_bytes": peak_memory_bytes()}


def run_samples(request):
    """Run each sample through the emulated NPU; sample i comes from ``inputs``/i.npz and goes to ``outputs``/i.npz.

    Arrays are stored by position (arr_0, arr_1 …), since tensor names may hold anything.
    """
    import numpy
    import onnxruntime

    options = session_options(request["provider_options"], request["config"], 2)
    session = onnxruntime.InferenceSession(request["model"], options)
    names = [output.name for output in session.get_outputs()]
    started = time.perf_counter()
    for index in range(request["samples"]):
        with numpy.load(os.path.join(request["inputs"], f"{index}.npz")) as sample:
            values = {name: sample[f"arr_{place}"] for place, name in enumerate(request["input_names"])}
        path = os.path.join(request["outputs"], f"{index}.npz")
        numpy.savez(path + ".part.npz", *session.run(names, values))
        os.replace(path + ".part.npz", path)
    return {
        "run_s": time.perf_counter() - started,
        "peak_memory_bytes": peak_memory_bytes(),
        "output_names": names,
    }


def peak_memory_bytes():
    """High-water mark of this process's resident memory, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def end_with_the_parent():
    """Ask the kernel to end this process when the one that started it ends, however that happens."""
    import ctypes

    PR_SET_PDEATHSIG, SIGKILL = 1, 9
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)


def main(request_path):
    """Do what the request asks; returns the exit code."""
    end_with_the_parent()
    with open(request_path) as file:
        request = json.load(file)
    try:
        result = {"error": None, **{"compile": compile_context, "emulate": run_samples}[request["task"]](request)}
    except Exception as error:
        traceback.print_exc()
        result = {"error": str(error)}
    with open(request["result"] + ".part", "w") as file:
        json.dump(result, file)
    os.replace(request["result"] + ".part", request["result"])
    return 1 if result["error"] is not None else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
