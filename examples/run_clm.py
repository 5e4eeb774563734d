"""Pretrain or fine-tune a causal language model on plain text, full or with LoRA adapters.

    accelerate launch examples/run_clm.py configs/run_clm.yaml
    accelerate launch examples/run_clm.py configs/run_clm.yaml --optim adamw_torch --output_dir runs/adamw
    python examples/run_clm.py --model_name_or_path HuggingFaceTB/SmolLM2-135M --train_file my_texts/ \\
        --optim muon --learning_rate 1e-4 --lora_r 16 --output_dir runs/lora
    torchrun --nproc-per-node 2 examples/run_clm.py configs/run_clm.yaml --model_name_or_path FOLDER_OR_ID --tp_size 2

Without `--model_name_or_path` a model is made from `--config_name` (default: a small Llama) with random weights.
Metrics go to `OUTPUT_DIR/eval_results.json`. Every flag of `TrainingArguments` is accepted.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import hf_emopt  # registers "muon" and its kin with TrainingArguments
from hf_emopt.integrations.transformers import unwrap_optimizer
from text_data import BlockDataset, pack_blocks, split_documents, stdlib_documents, text_documents, train_tokenizer
from yaml_args import parse_args


@dataclass
class ModelArguments:
    """What to train."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Hub id or local folder to fine-tune."})
    config_name: str | None = field(
        default=None, metadata={"help": "Hub id, folder or config.json of a model to train from random weights."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Changes to the config from scratch: 'hidden_size=64,num_hidden_layers=2'."}
    )
    tokenizer_name: str | None = field(
        default=None,
        metadata={
            "help": "Hub id or folder; default: the model's own, or a byte-level BPE trained on the training text."
        },
    )
    dtype: str = field(default="float32", metadata={"help": "Weights' dtype on loading: float32, bfloat16 or auto."})
    tp_size: int = field(
        default=1,
        metadata={"help": "Cut the matrices of a pretrained model over this many processes (tensor parallelism)."},
    )
    lora_r: int = field(default=0, metadata={"help": "Rank of LoRA adapters (needs peft); 0 trains every weight."})
    lora_alpha: int | None = field(default=None, metadata={"help": "LoRA scale; default 2 x rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout in front of the adapters."})
    lora_target_modules: str = field(
        default="all-linear", metadata={"help": "Comma-separated module names, or 'all-linear' (without the head)."}
    )
    modules_to_save: str | None = field(
        default=None, metadata={"help": "Comma-separated modules trained in full beside the adapters, e.g. lm_head."}
    )


@dataclass
class DataArguments:
    """What to train on."""

    dataset: str = field(
        default="stdlib", metadata={"help": "The running interpreter's standard library.", "choices": ["stdlib"]}
    )
    train_file: str | None = field(
        default=None, metadata={"help": "UTF-8 text file, or a folder of text files, instead of --dataset."}
    )
    validation_file: str | None = field(
        default=None, metadata={"help": "Text to evaluate on; default: pieces held out of the training text."}
    )
    held_out_every: int = field(default=50, metadata={"help": "Hold out every n-th piece of the text."})
    piece_chars: int = field(default=4096, metadata={"help": "Characters in a piece."})
    block_size: int = field(default=256, metadata={"help": "Tokens in a training sequence."})
    vocab_size: int = field(default=4096, metadata={"help": "Vocabulary of a tokenizer trained here."})
    max_train_blocks: int | None = field(default=None, metadata={"help": "Use at most this many training blocks."})
    max_eval_blocks: int | None = field(default=None, metadata={"help": "Use at most this many held-out blocks."})


def load_runs(data: DataArguments) -> tuple[list[list[str]], list[list[str]]]:
    """Training and held-out runs of text; see `text_data.split_documents`."""
    documents = text_documents(data.train_file) if data.train_file else stdlib_documents()
    if data.validation_file is None:
        return split_documents(documents, data.held_out_every, data.piece_chars)
    held_out = text_documents(data.validation_file)
    seen = set(held_out)
    return [[document] for document in documents if document not in seen], [[document] for document in held_out]


def load_tokenizer(
    model: ModelArguments, data: DataArguments, train_runs: Sequence[Sequence[str]]
) -> PreTrainedTokenizerBase:
    """The named tokenizer, else the model's own, else one trained on the training text only."""
    name = model.tokenizer_name or model.model_name_or_path
    if name:
        return AutoTokenizer.from_pretrained(name)
    return train_tokenizer(("".join(run) for run in train_runs), data.vocab_size)


def load_model(arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, block_size: int) -> PreTrainedModel:
    """A pretrained model, or one with random weights whose vocabulary is the tokenizer's."""
    if arguments.model_name_or_path:
        if arguments.config_name or arguments.config_overrides:
            raise ValueError(
                "--config_name and --config_overrides are for training from scratch: drop them or the model."
            )
        options: dict[str, Any] = {"dtype": arguments.dtype}
        if arguments.tp_size > 1:
            from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]

            options["distributed_config"] = DistributedConfig(tp_size=arguments.tp_size)
        return AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path, **options)
    if arguments.tp_size > 1:
        raise ValueError("--tp_size cuts a model while it is loaded: give --model_name_or_path.")
    config: PreTrainedConfig
    if arguments.config_name:
        config = AutoConfig.from_pretrained(arguments.config_name)
    else:
        config = LlamaConfig(
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=6,
            max_position_embeddings=block_size,
            tie_word_embeddings=True,
            bos_token_id=None,
        )
    if arguments.config_overrides:
        config.update_from_string(arguments.config_overrides)
    config.vocab_size = len(tokenizer)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    return AutoModelForCausalLM.from_config(config)


def add_lora(model: PreTrainedModel, arguments: ModelArguments) -> Any:
    """Wrap the model in LoRA adapters. Each adapter weight is a matrix of its own; `modules_to_save` copies keep their
    module's kind, so a head trained in full stays with AdamW."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("--lora_r needs peft: pip install 'hf-emopt[peft]'.") from error
    targets = arguments.lora_target_modules
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=arguments.lora_r,
        lora_alpha=2 * arguments.lora_r if arguments.lora_alpha is None else arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=targets if targets == "all-linear" else targets.split(","),
        modules_to_save=arguments.modules_to_save.split(",") if arguments.modules_to_save else None,
    )
    return get_peft_model(model, config)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, save; returns the metrics that `eval_results.json` holds."""
    arguments = (ModelArguments, DataArguments, TrainingArguments)
    model_args, data_args, training_args = parse_args(arguments, sys.argv[1:] if argv is None else argv)
    set_seed(training_args.seed)

    train_runs, held_out_runs = load_runs(data_args)
    tokenizer = load_tokenizer(model_args, data_args, train_runs)
    model = load_model(model_args, tokenizer, data_args.block_size)
    if model_args.lora_r:
        model = add_lora(model, model_args)
    elif model_args.modules_to_save:
        raise ValueError("--modules_to_save names modules trained beside LoRA adapters: add --lora_r, or drop it.")

    # A model that was cut while it was loaded can be saved and resumed by EmoptTrainer alone.
    trainer_class = hf_emopt.EmoptTrainer if model_args.tp_size > 1 else Trainer
    trainer = trainer_class(
        model=model,
        args=training_args,
        train_dataset=BlockDataset(
            pack_blocks(train_runs, tokenizer, data_args.block_size, data_args.max_train_blocks)
        ),
        eval_dataset=BlockDataset(
            pack_blocks(held_out_runs, tokenizer, data_args.block_size, data_args.max_eval_blocks)
        ),
        processing_class=tokenizer,
        data_collator=default_data_collator,  # blocks are of one length; a tokenizer without padding token must do
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)

    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    metrics["global_step"] = trainer.state.global_step
    optimizer = unwrap_optimizer(trainer.optimizer)
    if optimizer is not None:
        metrics["matrix_transforms"] = optimizer.transform_count
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_state()  # the log, for `hf-emopt report`
    return metrics


if __name__ == "__main__":
    main()
