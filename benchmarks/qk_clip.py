"""QK-clip's recorder on an accelerator: its logits against eager attention's, and what measuring costs.

    python benchmarks/qk_clip.py                      # checks and times every attention function that is there
    python benchmarks/qk_clip.py --device cpu --tiny  # a dry run

For each of SDPA, FlexAttention and FlashAttention (2 and 3, where they can be imported) it prints the largest relative
difference of any head's largest logit from what eager attention hands to softmax, with padding, in a sliding window and with
packed sequences, and the time of a forward and backward pass without and with the recorder in both modes.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import Tensor
from torch.nn import functional

from hf_emopt import MaxLogits


def functions(device: str) -> list[str]:
    """Attention functions that this machine can run."""
    names = ["sdpa"]
    if device == "cuda":
        names.append("flex_attention")
        names += ["flash_attention_2"] if importlib.util.find_spec("flash_attn") else []
        names += ["flash_attention_3"] if importlib.util.find_spec("flash_attn_interface") else []
    return names


def build(arguments: argparse.Namespace, window: int | None) -> Any:
    sizes = (64, 2, 4, 2, 96) if arguments.tiny else (2048, arguments.layers, 32, 8, 5632)
    hidden, layers, heads, kv_heads, inner = sizes
    options: dict[str, Any] = {
        "vocab_size": 1024, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": inner, "max_position_embeddings": 8192,
    }  # fmt: skip
    torch.manual_seed(0)
    config = tf.MistralConfig(**options, sliding_window=window, head_dim=hidden // heads)
    model = tf.MistralForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(4)
    return model.to(arguments.device).train()


def eager_logits(model: Any, inputs: dict[str, Tensor], queries: Tensor | None) -> dict[str, Tensor]:
    """Largest logit of each head as eager attention hands it to softmax; ``queries``: ``(B, Q)``, false for padding."""
    found: dict[str, Tensor] = {}
    running: list[str] = []
    original, hooks = functional.softmax, []

    def softmax(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if running:
            kept = logits if queries is None else logits.masked_fill(~queries[:, None, :, None], -torch.inf)
            found[running[-1]] = kept.detach().float().amax(dim=(0, 2, 3))
        return original(logits, *args, **kwargs)

    for name, query_key in MaxLogits(model, process_group="self").found.items():
        hooks.append(query_key.module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        hooks.append(query_key.module.register_forward_hook(lambda *_: running.pop() and None))
    functional.softmax = softmax  # type: ignore[assignment]
    try:
        with torch.no_grad():
            model.set_attn_implementation("eager")
            model(**inputs)
    finally:
        functional.softmax = original
        for hook in hooks:
            hook.remove()
    return found


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float(((found[name] - value).abs() / value.abs()).max()) for name, value in expected.items())


def check(arguments: argparse.Namespace, implementation: str) -> None:
    length = 64 if arguments.tiny else 512
    tokens = torch.randint(5, 1024, (2, length), device=arguments.device)
    mask = torch.ones_like(tokens)
    mask[0, : length // 3] = 0
    cases: dict[str, tuple[int | None, dict[str, Tensor], Tensor | None]] = {
        "causal": (None, {"input_ids": tokens}, None),
        "padding": (None, {"input_ids": tokens, "attention_mask": mask}, mask.bool()),
        "window": (length // 4, {"input_ids": tokens}, None),
        "packed": (
            None,
            {
                "input_ids": tokens[:1],
                "position_ids": torch.cat([torch.arange(length // 4), torch.arange(length - length // 4)])[None].to(
                    arguments.device
                ),
            },
            None,
        ),
    }
    for case, (window, inputs, queries) in cases.items():
        model = build(arguments, window)
        expected = eager_logits(model, inputs, queries)
        try:
            model.set_attn_implementation(implementation)
            with torch.no_grad(), MaxLogits(model, process_group="self") as recorder:
                model(**inputs)
        except Exception as error:
            print(f"{implementation:18} {case:8} did not run: {type(error).__name__}: {str(error)[:160]}")
            continue
        print(
            f"{implementation:18} {case:8} largest relative difference {difference(recorder.max_logits(), expected):.2e}"
        )


def seconds(step: Callable[[], None], repeats: int, device: str) -> float:
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def cost(arguments: argparse.Namespace, implementation: str) -> None:
    model = build(arguments, None)
    model.set_attn_implementation(implementation)
    for length in (64,) if arguments.tiny else (1024, 4096):
        tokens = torch.randint(5, 1024, (8192 // length, length), device=arguments.device)

        def step(tokens: Tensor = tokens) -> None:
            model(input_ids=tokens, labels=tokens).loss.backward()
            model.zero_grad()

        plain = seconds(step, arguments.repeats, arguments.device)
        line = f"{implementation:18} length {length}: {plain * 1e3:.1f} ms"
        for mode in ("exact", "bound"):
            with MaxLogits(model, mode, process_group="self"):
                with_it = seconds(step, arguments.repeats, arguments.device)
            line += f", {mode} {with_it * 1e3:.1f} ms ({with_it / plain:.3f} x)"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="sizes for a dry run")
    arguments = parser.parse_args()
    print(
        f"torch {torch.__version__}, transformers {tf.__version__}, functions: {', '.join(functions(arguments.device))}"
    )
    for implementation in ["eager", *functions(arguments.device)]:
        check(arguments, implementation)
    for implementation in functions(arguments.device):
        cost(arguments, implementation)


if __name__ == "__main__":
    main()
