"""Error tables of the inverse roots and eigenbases, in Markdown; the numbers of docs/roots-and-bases.md.

    OMP_NUM_THREADS=1 python benchmarks/root_errors.py --d 128
    python benchmarks/root_errors.py --device cuda --d 1024 --times

Errors are against ``eigh`` in float64 of the same float32 matrix. On the CPU the row of TF32 is its emulation, by cutting
mantissas; on a GPU its units. ``--times`` adds milliseconds a call (median of repetitions; CUDA only). Needs torch.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_emopt.linalg.eigenbasis import RefreshMethod, eigenbasis, refresh_eigenbasis
from hf_emopt.linalg.inverse_root import RootSolver, inverse_root
from hf_emopt.linalg.matmul_precision import Precision
from hf_emopt.linalg.symmetric_batches import spectral_bound

EXPONENT = 0.25
# The least relative epsilon that each precision bears on singular matrices.
EPSILONS: dict[str, float] = {"highest": 1e-6, "bf16x3": 1e-5, "tf32": 1e-3, "tf32_emulated": 1e-3}


def spectra(d: int) -> dict[str, Tensor]:
    def geometric(condition: float) -> Tensor:
        return condition ** -torch.linspace(0, 1, d, dtype=torch.float64)

    first = torch.zeros(d, dtype=torch.float64)
    first[0] = 1.0
    third = torch.zeros(d, dtype=torch.float64)
    third[: d // 3] = 1.0
    third[2 * (d // 3) :] = -1e-9
    return {
        "identity": torch.ones(d, dtype=torch.float64),
        "1e2": geometric(1e2),
        "1e4": geometric(1e4),
        "1e6": geometric(1e6),
        "1e10": geometric(1e10),
        "fourfold": geometric(1e4)[::4].repeat_interleave(4)[:d],
        "1, 0, -1e-9": third,
        "rank 1": first,
    }


def make(d: int, device: torch.device) -> tuple[list[str], Tensor]:
    generator = torch.Generator().manual_seed(0)
    table = spectra(d)
    q = torch.linalg.qr(torch.randn(len(table), d, d, generator=generator, dtype=torch.float64)).Q.to(device)
    a = (q * torch.stack(list(table.values())).to(device).unsqueeze(-2)) @ q.mT
    return list(table), (0.5 * (a + a.mT)).float()


def reference_root(a: Tensor, relative_epsilon: float) -> Tensor:
    eigenvalues, q = torch.linalg.eigh(a.double())
    ridge = (relative_epsilon * spectral_bound(a).squeeze(-1).double()).clamp(min=1e-12)
    shifted = eigenvalues - eigenvalues[:, :1].clamp(max=0) + ridge
    return (q * shifted.pow(-EXPONENT).unsqueeze(-2)) @ q.mT


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"\n{title}\n")
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def root_rows(a: Tensor, tf32: Precision) -> tuple[list[list[str]], list[list[str]]]:
    cases: list[tuple[RootSolver, Precision]] = [("eigh", "highest"), ("coupled_newton", "highest")]
    cases += [("coupled_newton", precision) for precision in ("bf16x3", tf32, "fp16")]
    forward, backward = [], []
    for relative_epsilon in (0.0, 1e-6, 1e-5, 1e-3):
        reference = reference_root(a, relative_epsilon)
        size = reference.flatten(1).norm(dim=1)
        for solver, precision in cases:
            result = inverse_root(
                a, EXPONENT, solver=solver, relative_epsilon=relative_epsilon, precision=precision, fallback=False
            )
            error = (result.value.double() - reference).flatten(1).norm(dim=1) / size
            name = [solver, precision, f"{relative_epsilon:.0e}" if relative_epsilon else "0"]
            failed = result.failed.tolist()
            forward.append(name + ["eigh" if f else f"{x:.0e}" for x, f in zip(error.tolist(), failed)])
            backward.append(name + ["eigh" if f else f"{x:.0e}" for x, f in zip(result.residual.tolist(), failed)])
    return forward, backward


def near(a: Tensor, angle: float) -> Tensor:
    """The eigenbasis after a random rotation, as a matrix that has changed a little since the last refresh leaves it."""
    q = eigenbasis(a.double())
    generator = torch.Generator().manual_seed(1)
    s = torch.randn(q.shape, generator=generator, dtype=torch.float64).to(a.device) * (angle / a.shape[-1] ** 0.5)
    return (q @ torch.matrix_exp(s - s.mT)).float()


def basis_rows(a: Tensor, tf32: Precision, angle: float) -> list[list[str]]:
    q_old = near(a, angle)
    norm = a.double().flatten(1).norm(dim=1)

    def off_diagonal(q: Tensor) -> list[str]:
        b = q.double().mT @ a.double() @ q.double()
        off = b - torch.diag_embed(b.diagonal(dim1=-2, dim2=-1))
        return [f"{x:.0e}" for x in (off.flatten(1).norm(dim=1) / norm).tolist()]

    rows = [["before", "", "", *off_diagonal(q_old), ""]]
    cases: list[tuple[RefreshMethod, Precision]] = [("eigh", "highest"), ("qr", "highest")]
    cases += [("orthogonal_iteration", precision) for precision in ("highest", "bf16x3", tf32)]
    for method, precision in cases:
        for refreshes in (1,) if method == "eigh" else (1, 10):
            q = q_old
            fell_back = 0
            for _ in range(refreshes):
                result = refresh_eigenbasis(a, q, method, precision=precision)
                q = result.q
                fell_back += int(result.fell_back.sum())
            error = (q.double().mT @ q.double() - torch.eye(q.shape[-1], device=q.device)).abs().max().item()
            note = f"{error:.0e}" + (f" ({fell_back} by QR)" if fell_back else "")
            rows.append([method, precision, str(refreshes), *off_diagonal(q), note])
    return rows


def milliseconds(call: Callable[[], object], repetitions: int = 3) -> str:
    call()
    times = []
    for _ in range(repetitions):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return f"{statistics.median(times):.1f}"


def time_rows(shapes: Sequence[tuple[int, int]], device: torch.device) -> list[list[str]]:
    cases: list[tuple[str, str, Callable[[Tensor, Tensor], object]]] = []

    def add_root(solver: RootSolver, precision: Precision) -> None:
        def call(a: Tensor, q: Tensor) -> object:
            epsilon = EPSILONS[precision]
            result = inverse_root(a, EXPONENT, solver=solver, relative_epsilon=epsilon, precision=precision)
            assert not result.fell_back.any(), (solver, precision)
            return result

        cases.append((f"A^(-1/4), {solver}", precision, call))

    def add_basis(method: RefreshMethod, precision: Precision) -> None:
        def call(a: Tensor, q: Tensor) -> object:
            result = refresh_eigenbasis(a, q, method, precision=precision)
            assert not result.fell_back.any(), (method, precision)
            return result

        cases.append((f"basis, {method}", precision, call))

    precisions: tuple[Precision, ...] = ("highest", "bf16x3", "tf32")
    add_root("eigh", "highest")
    for precision in precisions:
        add_root("coupled_newton", precision)
    add_basis("eigh", "highest")
    add_basis("qr", "highest")
    for precision in precisions:
        add_basis("orthogonal_iteration", precision)

    rows = [[name, precision] for name, precision, _ in cases]
    for batch, d in shapes:
        generator = torch.Generator(device).manual_seed(0)
        g = torch.randn(batch, d, 2 * d, generator=generator, device=device)
        g *= torch.logspace(0, -3, d, device=device).unsqueeze(-1)
        a = g @ g.mT / (2 * d)
        q = near(a, 0.03)
        for row, (_, _, call) in zip(rows, cases):
            row.append(milliseconds(lambda call=call, a=a, q=q: call(a, q)))  # type: ignore[misc]
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--d", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--angle", type=float, default=0.03, help="rotation of the old basis, about")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--shapes", nargs="+", default=["16x1024", "1x2048", "16x2048"], help="for --times: N x d")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if args.times and device.type != "cuda":
        parser.error("--times measures CUDA devices only: add --device cuda")
    tf32: Precision = "tf32" if device.type == "cuda" else "tf32_emulated"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, d = {args.d}")

    names, a = make(args.d, device)
    forward, backward = root_rows(a, tf32)
    head = ["solver", "precision", "relative epsilon", *names]
    print_table("Error of A^(-1/4), relative in the Frobenius norm", head, forward)
    print_table("Residual (backward error relative to A)", head, backward)
    head = ["method", "precision", "refreshes", *names, "orthogonality, largest entry"]
    print_table("Off-diagonal part of Q^T A Q", head, basis_rows(a, tf32, args.angle))
    if args.times:
        shapes = [(int(n), int(d)) for n, d in (shape.split("x") for shape in args.shapes)]
        rows = time_rows(shapes, device)
        print_table("Milliseconds", ["what", "precision", *(f"{n} x {d}" for n, d in shapes)], rows)


if __name__ == "__main__":
    main()
