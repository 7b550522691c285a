"""Wraps any Hugging Face encoder as a text classifier.

Shapes: B texts, T tokens, C classes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from halfstep.errors import ConfigError
from halfstep.trainer.models.pretrained.folder import open_folder
from halfstep.trainer.models.pretrained.weights import Pretrained, load_weights

IGNORED_LABEL = -1
"""Label of a row that only fills a batch and does not count."""
ClassifierBatch: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""(ids_BT int64, mask_BT bool, labels_B int64 with -1 for "does not count")."""


def open_classifier(
    source: str | os.PathLike[str],
    names: Sequence[str] | None,
    *,
    dropout: float | None = None,
    class_weights: Sequence[float] | None = None,
    label_smoothing: float = 0.0,
    trust_remote_code: bool = False,
    revision: str = "",
    seed: int = 0,
) -> PretrainedClassifier:
    """Load a pretrained encoder with a head for these classes, in fp32 on the CPU, in train mode.

    The head is the folder's own if its ``id2label`` equals ``names`` in order; otherwise it is
    drawn from ``seed``. Stored 16-bit weights are widened, which is exact.

    ``names`` are those of two or more classes, in the order of their labels; None: the folder's
    own. ``dropout`` is all the model's dropout probabilities; None keeps its own. ``class_weights``
    and ``label_smoothing`` are for the loss.

    Raises:
        ConfigError: If an argument, the source or the architecture cannot be used.
        CheckpointError: If the folder is damaged or lacks weights of the encoder.
    """
    names = None if names is None else _checked_names(names)
    folder = open_folder(source, trust_remote_code=trust_remote_code, revision=revision)
    model_class = folder.model_class("AutoModelForSequenceClassification", "classifier")
    config = folder.config
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{folder.folder}: {config.model_type!r} is an encoder with a decoder; for "
            "classification take an encoder (BERT, RoBERTa, DistilBERT, ELECTRA, ...)"
        )
    own = getattr(config, "id2label", None) or {}
    if names is None:
        names = _checked_names([own[number] for number in sorted(own)])
    weights_C = class_weights_tensor(class_weights, names)
    same = tuple(own.get(i) for i in range(len(own))) == names
    config.id2label = dict(enumerate(names))
    config.label2id = {name: i for i, name in enumerate(names)}
    config.problem_type = "single_label_classification"
    if getattr(config, "pad_token_id", None) is None:  # GPT-2's classifier looks for the last token
        eos = getattr(config, "eos_token_id", None)
        config.pad_token_id = eos[0] if isinstance(eos, list) else eos
    head: Literal["kept", "new"] = "kept" if same else "new"
    model, drawn = load_weights(
        folder, model_class, torch.float32, dropout=dropout, head=head, seed=seed
    )
    return PretrainedClassifier(model, names, weights_C, label_smoothing, new_parameters=drawn)


class PretrainedClassifier(Pretrained):
    """A ``transformers`` classifier with loss sums.

    Its dropout draws from torch's global generator, so its masks depend on how ranks share a batch.

    Attributes:
        names: Names of the classes.
        new_parameters: Names of parameters in ``model`` that were drawn, not loaded.
    """

    def __init__(
        self,
        model: Any,
        names: tuple[str, ...],
        class_weights_C: Tensor | None = None,
        label_smoothing: float = 0.0,
        *,
        new_parameters: tuple[str, ...] = (),
    ) -> None:
        super().__init__(model)
        self.names = names
        self.label_smoothing = label_smoothing
        self.new_parameters = new_parameters
        # Not a buffer, because a policy that casts the module to 16 bits must not round them.
        self._class_weights_C = class_weights_C

    @property
    def head_is_new(self) -> bool:
        """Whether the classification head was drawn rather than loaded."""
        return any(".pooler." not in name for name in self.new_parameters)

    def forward(self, batch: ClassifierBatch) -> Tensor:
        """Return the logits of a batch, ``(B, C)``, as :meth:`logits` does."""
        return self.logits(batch)

    def logits(self, batch: ClassifierBatch) -> Tensor:
        """Compute logits ``(B, C)`` in fp32; the batch's labels are ignored."""
        ids_BT, mask_BT = batch[:2]
        out: Tensor = self.model(input_ids=ids_BT, attention_mask=mask_BT.long()).logits
        return out.float()

    def loss_sum(self, batch: ClassifierBatch) -> tuple[Tensor, Tensor]:
        """Return the summed loss and the summed weights of the batch's labels, fp32 scalars."""
        logits_BC, weights_C = self.logits(batch), self._class_weights_C
        if weights_C is not None and weights_C.device != logits_BC.device:
            weights_C = self._class_weights_C = weights_C.to(logits_BC.device)
        smoothing = self.label_smoothing if self.training else 0.0
        return classification_loss(logits_BC, batch[2], weights_C, smoothing)


def _checked_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the classes' names, or raise ConfigError if they are not valid."""
    found = tuple(names)
    if len(found) < 2 or len(set(found)) < len(found) or not all(found):
        raise ConfigError(
            f"a classifier needs two or more different, non-empty labels, got {list(found)}"
        )
    return found


# The loss of a classifier, as a sum and its divisor.


def class_weights_tensor(weights: Sequence[float] | None, labels: Sequence[str]) -> Tensor | None:
    """Make an fp32 tensor of class weights on the default device; None stays None.

    Raises:
        ConfigError: If there is not one positive finite number per class.
    """
    if weights is None:
        return None
    if len(weights) != len(labels) or not all(0.0 < w < math.inf for w in weights):
        raise ConfigError(
            f"class_weights must be {len(labels)} positive numbers, one for each of "
            f"{', '.join(labels)}; got {list(weights)!r}"
        )
    return torch.tensor(list(weights), dtype=torch.float32)


def classification_loss(
    logits_BC: Tensor,
    labels_B: Tensor,
    class_weights_C: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy, and the summed weights that divide it; in fp32 at least.

    Added up over several batches, loss sum over weight sum is the loss of one batch with all their
    rows, however the rows are shared between ranks and micro-batches.

    Args:
        logits_BC: (B, C), any floating dtype.
        labels_B: (B,) int64, 0 to C - 1, or -1 for rows that do not count.
        class_weights_C: (C,) weight of each class; None: 1.
        label_smoothing: Share of each target that is spread evenly over all classes.

    Returns:
        The loss sum and the weight sum, two scalars.

    **Source:** smoothing: Szegedy et al., "Rethinking the Inception Architecture", CVPR 2016,
    section 7; weights as in ``torch.nn.CrossEntropyLoss``.
    """
    logits_BC = logits_BC.to(torch.promote_types(logits_BC.dtype, torch.float32))
    if class_weights_C is not None:
        class_weights_C = class_weights_C.to(logits_BC.dtype)
    loss = functional.cross_entropy(
        logits_BC,
        labels_B,
        class_weights_C,
        ignore_index=IGNORED_LABEL,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    counted = labels_B != IGNORED_LABEL
    if class_weights_C is None:
        return loss, counted.sum().to(loss.dtype)
    weights_B = class_weights_C[labels_B.clamp(min=0)]
    return loss, torch.where(counted, weights_B, 0.0).sum()
