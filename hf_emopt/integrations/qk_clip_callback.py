"""QK-clip in a ``Trainer``: measured in the forward passes of a step, clipped after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from transformers import TrainerCallback, TrainerState, TrainingArguments

from hf_emopt.integrations.callback import add_to_log
from hf_emopt.integrations.max_logits import MaxLogits
from hf_emopt.integrations.registry import unwrap_optimizer
from hf_emopt.optimizers.qk_clip import check_options, clip_found


class QKClipCallback(TrainerCallback):
    """Keeps attention logits under a threshold: ``Trainer(callbacks=[hf_emopt.QKClipCallback()])``.

    After each optimizer step, queries and keys of the heads whose largest logit in the step's forward passes exceeded the
    threshold less a margin are scaled to that, see :func:`hf_emopt.qk_clip`. The maximum is over all
    micro-batches of the step and over all processes, so that weights stay the same everywhere. Evaluation is not
    measured. It works with every optimizer; those of this package have the bits that they keep of 16-bit weights scaled
    too. Logs get ``qk_clip/max_logit``, the largest logit since the last log, and ``qk_clip/clipped_heads``, how many
    times a head was clipped.

    Logits are measured on the weights before the step, so the next forward pass finds them higher by the growth of one step.
    The margin leaves room for this growth. A batch with larger logits than the batches before it can still exceed the
    threshold once; its heads are clipped then.

    Args:
        threshold: largest allowed logit; 100 in the paper.
        every: optimizer steps from one clip to the next; in between nothing is measured.
        mode: ``"exact"`` or ``"bound"``, see :class:`hf_emopt.MaxLogits`.
        balance: the query's share of a factor as an exponent, 0 to 1.
        modules: regular expressions for attention modules' names; the others are left alone.
        margin: share of the threshold that is left free for the growth of logits in ``every`` steps, at least 0 and below 1.
            0 is the paper's algorithm, which scales to the threshold itself.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        threshold: float = 100.0,
        every: int = 1,
        mode: Literal["exact", "bound"] = "exact",
        balance: float = 0.5,
        modules: str | Sequence[str] | None = None,
        margin: float = 0.1,
    ) -> None:
        check_options(threshold, balance, margin)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r} must be a whole number of optimizer steps, at least 1")
        if mode not in ("exact", "bound"):
            raise ValueError(f"mode={mode!r} is not one of 'exact', 'bound'")
        self.threshold, self.every, self.mode = threshold, every, mode
        self.balance, self.modules, self.margin = balance, modules, margin
        self._recorder: MaxLogits | None = None
        self._largest, self._clipped = float("-inf"), 0

    def on_train_begin(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        """Finds queries and keys.

        Raises:
            ValueError: under DeepSpeed, context or sequence parallelism; with ``torch_compile`` unless ``every`` is 1; where
                queries or keys come of adapters; and see :class:`hf_emopt.MaxLogits`.
        """
        _refuse(args)
        if args.torch_compile and self.every > 1:
            raise ValueError(
                f"QKClipCallback(every={self.every}): a graph that torch_compile makes in a step without measuring measures "
                "nothing later; use every=1, or train without torch_compile"
            )
        self._stop()
        recorder = MaxLogits(kwargs["model"], self.mode, modules=self.modules, training_only=True)
        adapted = [name for name, query_key in recorder.found.items() if query_key.adapted]
        if adapted:
            raise ValueError(
                f"QKClipCallback: the query or key of {adapted[0]} comes of an adapter and a weight that does not train, "
                "which would have to be scaled too. Train the weights themselves, or leave such modules out with modules=..."
            )
        if not any(query_key.trains for query_key in recorder.found.values()):
            raise ValueError(
                "QKClipCallback: no attention module has a query or key that trains and that a factor acts on (all are "
                "frozen, or normed without a weight): there is nothing to clip"
            )
        # Modules that a clip cannot act on are not measured.
        recorder.leave_out([name for name, query_key in recorder.found.items() if not query_key.trains])
        self._recorder = recorder

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Measures from here on where this step ends in a clip."""
        if self._recorder is not None and (state.global_step + 1) % self.every == 0:
            self._recorder.reset()
            self._recorder.start()

    def on_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        """Clips.

        Raises:
            RuntimeError: nothing was measured.
            ValueError: see :func:`hf_emopt.qk_clip`.
        """
        recorder = self._recorder
        if recorder is None or not recorder.recording:
            return
        recorder.stop()
        logits = recorder.max_logits()
        optimizer = unwrap_optimizer(kwargs.get("optimizer"))
        report = clip_found(recorder.found, logits, self.threshold, self.balance, optimizer, self.margin)
        if report.max_logit == float("-inf"):
            raise RuntimeError(
                "QKClipCallback: no attention logit was measured in a step. The model's forward pass did not run its "
                "attention in training mode, or runs it in a graph that was compiled or captured before; train "
                "without torch_compile or without the callback"
            )
        self._largest = max(self._largest, report.max_logit)
        self._clipped += report.clipped_heads

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Adds what was measured since the last log."""
        logs = kwargs.get("logs")
        if logs is None or "loss" not in logs or self._largest == float("-inf"):
            return
        add_to_log(logs, state, {"qk_clip/max_logit": self._largest, "qk_clip/clipped_heads": self._clipped})
        self._largest, self._clipped = float("-inf"), 0

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        """Drops the reference to the model."""
        self._stop()

    def _stop(self) -> None:
        if self._recorder is not None:
            self._recorder.stop()
        self._recorder = None
        self._largest, self._clipped = float("-inf"), 0


def _refuse(args: TrainingArguments) -> None:
    """Refuses weights or sequences that are cut in a way that hides heads or logits."""
    if getattr(args, "deepspeed", None) or getattr(args, "deepspeed_plugin", None):
        raise ValueError(
            "QKClipCallback: DeepSpeed keeps the weights that it steps in flat tensors of its own, in which rows of heads "
            "cannot be scaled; train under FSDP2 or DDP"
        )
    config = getattr(args, "parallelism_config", None)
    for name in ("cp", "sp"):
        if config is not None and getattr(config, f"{name}_enabled", False):
            raise ValueError(
                f"QKClipCallback: parallelism_config cuts sequences among processes ({name}_size), none of which sees all "
                "keys of a query; leave the callback out, or train without it"
            )
