"""The layers of a decoder that hold parameters: Linear, Embedding, RMSNorm."""

from xtrain.engine import ops
from xtrain.engine.params import Parameter, Part, padded_rows
from xtrain.engine.tensor import Tensor
from xtrain.nn.module import Module


class Linear(Module):
    """y = x @ weight.T, without bias; x (..., in_features) -> (..., sum of rows).

    Several named parts make one fused product: `Linear(D, {"gate_proj": F, "up_proj": F})` holds
    [gate_proj | up_proj] row after row. Checkpoints and exports see the parts by name.
    """

    def __init__(self, in_features: int, rows: int | dict[str, int], *, std: float):
        parts = [Part(n, r) for n, r in rows.items()] if isinstance(rows, dict) else []
        out_features = sum(p.rows for p in parts) if parts else rows
        self.weight = Parameter((out_features, in_features), std=std, decay=True, parts=parts)

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight)


class Embedding(Module):
    """Row lookup: ids (...,) int32 -> (..., D); also the storage of the output head.

    Rows are padded in memory to a multiple of 64, where matrix products are several times faster.
    The padding is zero, receives no gradient and is never exported.
    """

    def __init__(self, vocab_size: int, features: int, *, std: float):
        padded = padded_rows(vocab_size)
        self.weight = Parameter((padded, features), std=std, decay=True, rows=vocab_size)

    def __call__(self, ids) -> Tensor:
        return ops.embedding(self.weight, ids)


class RMSNorm(Module):
    """Gain of a root-mean-square normalization over `features`; starts at one, never decayed."""

    def __init__(self, features: int, *, eps: float):
        self.eps = eps
        self.weight = Parameter((features,), std=None, decay=False)

    def __call__(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, eps=self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize x + residual; returns (normalized, sum)."""
        return ops.add_rms_norm(x, residual, self.weight, eps=self.eps)
