"""One hierarchy of exceptions: every refusal says what was asked, what was found and what would do."""


class LumenError(Exception):
    """Base of every error that lumen_lab raises on purpose."""


class ImageError(LumenError):
    """A photograph or mask that cannot be read, or is not what its name says."""


class CheckpointError(LumenError):
    """Weights that do not fit the network, or cannot be fetched."""


class ChipError(LumenError):
    """A chip name that is unknown, ambiguous or not served by the NPU compiler."""


class AuditError(LumenError):
    """A network that cannot be read operation by operation, or a join of two views that do not fit."""


class RewriteError(LumenError):
    """A rewrite or plan that was refused, with the condition that refused it."""


class QuantizationError(LumenError):
    """A network, an encoding or calibration pictures that the quantiser cannot use."""


class ExportError(LumenError):
    """A network that cannot be written as ONNX."""


class CompileError(LumenError):
    """The NPU compiler or the emulation refused, crashed or ran out of time or space."""


class ArtifactError(LumenError):
    """A file that does not fit the manifest beside it."""


class DatasetError(LumenError):
    """A folder of images and masks that cannot be paired or split as asked."""


class MetricError(LumenError):
    """A prediction and a matte that cannot be compared, or scores that cannot be put together."""


class MissingDependencyError(LumenError):
    """An optional package or platform that the asked step needs and that is not here."""
