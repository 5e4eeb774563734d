"""QLoRA for real: a base in 4 bits by bitsandbytes, adapters under every optimizer, and the base unchanged to the last byte.

    python benchmarks/qlora_check.py --model ~/.cache/hf_emopt_realdata/smollm2-135m --steps 10

For each optimizer it loads the checkpoint with `BitsAndBytesConfig(load_in_4bit=True)`, adds adapters to all linear layers,
trains on fixed tokens, and checks that every adapter moved, that every frozen tensor (packed weights and the constants of
their quantization) is the same object with the same bytes, that each matrix or pair was transformed once a step, and that
the optimizer's state is of the adapters alone. Prints one line for each. Needs `transformers`, `peft`, `bitsandbytes`.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import hf_emopt

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "muon": (hf_emopt.Muon, {"lr": 1e-3}),
    "muon lora=joint": (hf_emopt.Muon, {"lr": 1e-3, "lora": "joint"}),
    "normuon lora=joint": (hf_emopt.NorMuon, {"lr": 1e-3, "lora": "joint"}),
    "soap": (hf_emopt.SOAP, {"lr": 1e-3, "precondition_frequency": 2}),
    "shampoo": (hf_emopt.Shampoo, {"lr": 1e-3, "precondition_frequency": 2}),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder or Hub id")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lora_r", type=int, default=16)
    return parser.parse_args(argv)


def quantized(args: argparse.Namespace) -> Any:
    """The checkpoint in 4 bits, with adapters on all linear layers."""
    import peft

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        args.model,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
        device_map={"": args.device},
        dtype=torch.bfloat16,
    )
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules="all-linear")
    )


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def frozen(model: Any) -> dict[str, tuple[int, int, str]]:
    """Identity, address and bytes of everything that is not trained: parameters, buffers, constants of quantization."""
    tensors = {name: p for name, p in model.named_parameters() if not p.requires_grad} | dict(model.named_buffers())
    for name, parameter in list(tensors.items()):
        state = getattr(parameter, "quant_state", None)
        for part in ("absmax", "code") if state is not None else ():
            tensors[f"{name}.{part}"] = getattr(state, part)
    return {name: (id(t), t.data_ptr(), digest(t)) for name, t in tensors.items()}


def check(args: argparse.Namespace, name: str) -> str:
    """Trains with one optimizer; a line of figures.

    Raises:
        AssertionError: a frozen tensor changed, an adapter did not, or something else than adapters has state.
    """
    cls, options = OPTIMIZERS[name]
    model = quantized(args)
    optimizer = cls(model, **options)
    before = frozen(model)
    four_bit = sum(p.dtype is torch.uint8 for p in model.parameters())
    assert four_bit, "nothing is in 4 bits"
    trained = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    assert set(trained) == {n for group in optimizer.param_groups for n in group["param_names"]}
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(args.steps):
        tokens = torch.randint(0, model.config.vocab_size, (args.batch_size, args.length), generator=generator)
        tokens = tokens.to(args.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    after = frozen(model)
    changed = [n for n in before if before[n] != after[n]]
    assert before.keys() == after.keys(), "a frozen tensor appeared or vanished"
    assert not changed, f"frozen tensors changed: {changed[:5]}"
    still = [n for n, p in model.named_parameters() if n in trained and torch.equal(p, trained[n])]
    assert not still, f"adapters did not move: {still[:5]}"
    count = optimizer.routes.matrix_count
    assert optimizer.transform_count == count * args.steps, (optimizer.transform_count, count, args.steps)
    assert not optimizer.skipped_steps
    assert set(optimizer.state) == {p for p in model.parameters() if p.requires_grad}
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t))
    peak = f", peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB" if args.device == "cuda" else ""
    return (
        f"{name}: {four_bit} weights in 4 bits and {len(before)} frozen tensors unchanged, {len(trained)} adapter weights "
        f"moved, {count} transforms a step, state {state / 2**20:.1f} MiB{peak}, loss {losses[0]:.3f} to {losses[-1]:.3f}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    for name in OPTIMIZERS:
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        print(check(args, name), flush=True)


if __name__ == "__main__":
    main()
