"""Training a BiRefNet on scenes with exact mattes: supervised on every side output.

The network trains in its grid-sample form (``decompose_deform_conv``), the same function with a backward pass that
uses every core, and comes back in its own form.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from timm.layers import DropPath
from torch import Tensor, nn
from torch.utils.data import Dataset

from lumen_lab.distillation.attention_limit import largest_logits, limit_logits
from lumen_lab.distillation.gates import gate_loss, gate_maps
from lumen_lab.distillation.loop import Run, Task, Terms, Validation, run_task
from lumen_lab.distillation.losses import supervised_loss
from lumen_lab.distillation.recipe import Recipe
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV, RECOMPOSE_DEFORM_CONV, GridSampleConv
from lumen_lab.rewrites.plan import place
from lumen_lab.rewrites.record import Rewrite, Site

LIMIT_EVERY = 10  # steps between two looks at the attention logits: they grow over hundreds
ScenesAt = Callable[[tuple[int, int]], Dataset]


def train(
    network: nn.Module,
    scenes_at: ScenesAt,
    recipe: Recipe,
    out_dir: str | Path,
    *,
    accelerator: Accelerator | None = None,
    validate: Validation | None = None,
    validate_every: int = 500,
    made_from: Mapping[str, str] | None = None,
    workers: int = 1,
    checkpoint_every: int = 200,
    log_every: int = 20,
    stop_after: int | None = None,
) -> nn.Module:
    """Train a copy of ``network`` and return it with the averaged weights, on the CPU and in eval mode.

    ``scenes_at((H, W))`` gives a dataset of scenes (``image``, ``matte``) whose item i depends on i alone. The state is
    kept in ``out_dir/checkpoint.pt``; a second call goes on from it, with as many threads to the same bits, and refuses
    a checkpoint of another recipe, precision, number of processes or network (``ArtifactError``), and one that names
    another start or sources than ``made_from`` does (name → words). Ctrl-C and SIGTERM wait until the step is made and
    kept; after a kill, the steps since the last checkpoint are made again. ``stop_after`` ends early.

    ``accelerator`` says where and in which precision; by default what ``accelerate launch`` or the machine offers, in
    float32. Each process takes its share of every batch; batch statistics are those of the share. ``validate`` scores
    the averaged network every ``validate_every`` steps, in the first process, once the step is kept. The log is
    ``train.csv`` (a line is of the step with that index), ``validation.csv`` (after so many steps) and TensorBoard.
    torch's global random state is left as it was found. ``LumenError`` if the loss or gradient is no longer finite, or
    a loading process dies.
    """
    return run_task(
        SupervisedTask(network, scenes_at, recipe),
        out_dir,
        accelerator=accelerator,
        validate=validate,
        validate_every=validate_every,
        made_from=made_from,
        workers=workers,
        checkpoint_every=checkpoint_every,
        log_every=log_every,
        stop_after=stop_after,
    )


class SupervisedTask(Task):
    """A copy of ``network`` in its trainable form, trained on mattes."""

    recipe: Recipe

    def __init__(self, network: nn.Module, scenes_at: ScenesAt, recipe: Recipe):
        super().__init__(trainable_form(network, recipe), recipe)
        self.given, self.scenes_at = network, scenes_at
        self.logits_seen: dict[str, Tensor] = {}

    def groups(self) -> list[dict]:
        return parameter_groups(self.network, self.recipe)

    def terms(self, view: nn.Module, scene: Mapping[str, Tensor], step: int) -> Terms:
        image, matte, weights = scene["image"], scene["matte"], self.recipe.weights
        look = self.recipe.max_attention_logit is not None and step % LIMIT_EVERY == 0
        with (
            gate_maps(self.network) if weights.gate else nullcontext() as gates,
            largest_logits(self.network) if look else nullcontext({}) as logits,
        ):
            outputs = view(image)
        terms = supervised_loss(outputs, image, matte, weights)
        if gates:
            terms["gate"] = weights.gate * gate_loss(gates)
        for path, largest in logits.items():
            self.logits_seen[path] = torch.maximum(largest, self.logits_seen.get(path, largest))
        return terms

    def updated(self, run: Run, step: int) -> None:
        largest = {path: run.accelerator.gather(value[None]).amax(0) for path, value in self.logits_seen.items()}
        limit_logits(self.network, largest, self.recipe.max_attention_logit)
        self.logits_seen.clear()

    def result(self, average: Mapping[str, Tensor]) -> nn.Module:
        return averaged_network(self.given, self.recipe, average)


def trainable_form(network: nn.Module, recipe: Recipe) -> nn.Module:
    """A copy in its grid-sample form and in training mode, with dropout and stochastic depth as the recipe says."""
    model = converted(network, DECOMPOSE_DEFORM_CONV)
    for module in model.modules():
        if isinstance(module, nn.Dropout) and recipe.dropout is not None:
            module.p = recipe.dropout
        if isinstance(module, DropPath) and recipe.drop_path is not None:
            module.drop_prob = recipe.drop_path
    return model.train()


def converted(network: nn.Module, rule: Rewrite) -> nn.Module:
    """A copy on the CPU in which ``rule`` has replaced every module of its kind.

    ``rewrite`` would trace a forward pass to make the constants of one size ahead; here each size makes its own when
    it comes.
    """
    with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng([]):
        model = copy.deepcopy(network).cpu()
        for path, module in list(model.named_modules()):
            if isinstance(module, rule.replaces):
                for place_of, built in rule.built(Site(path, module, (), None)).items():
                    place(model, place_of, built, rule.name)
    return model


def averaged_network(network: nn.Module, recipe: Recipe, average: Mapping[str, Tensor]) -> nn.Module:
    """A copy of ``network`` in eval mode on the CPU, with the weights ``average`` of its trainable form."""
    form = trainable_form(network, recipe)
    form.load_state_dict({name: value.cpu() for name, value in average.items()})
    if not any(isinstance(module, GridSampleConv) for module in network.modules()):
        form = converted(form, RECOMPOSE_DEFORM_CONV)
    result = copy.deepcopy(network).cpu().eval()
    result.load_state_dict(form.state_dict())
    return result


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict]:
    """Four groups: encoder or not, decayed or not; biases, norms and position tables do not decay."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decayed = parameter.ndim >= 2 and not name.endswith("relative_position_bias_table")
        groups.setdefault((name.startswith("bb."), decayed), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": recipe.weight_decay if decayed else 0.0,
            "rate_scale": recipe.encoder_rate if encoder else 1.0,
        }
        for (encoder, decayed), parameters in groups.items()
    ]
