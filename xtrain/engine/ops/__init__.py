"""The declared ops, one file each; importing this package declares them all."""

from xtrain.engine.ops.adamw import adamw
from xtrain.engine.ops.attention import attention
from xtrain.engine.ops.dropout import dropout
from xtrain.engine.ops.elementwise import add, multiply, scale
from xtrain.engine.ops.embedding import embedding
from xtrain.engine.ops.global_norm import global_norm
from xtrain.engine.ops.linear import linear, matmul
from xtrain.engine.ops.linear_cross_entropy import linear_cross_entropy, token_logprob
from xtrain.engine.ops.movement import merge_heads, reshape, transpose
from xtrain.engine.ops.qk_norm_rope import qk_norm_rope
from xtrain.engine.ops.reduce import mean, total
from xtrain.engine.ops.rms_norm import add_rms_norm, rms_norm
from xtrain.engine.ops.softmax import softmax
from xtrain.engine.ops.swiglu import swiglu

__all__ = [
    "adamw",
    "add",
    "add_rms_norm",
    "attention",
    "dropout",
    "embedding",
    "global_norm",
    "linear",
    "linear_cross_entropy",
    "matmul",
    "mean",
    "merge_heads",
    "multiply",
    "qk_norm_rope",
    "reshape",
    "rms_norm",
    "scale",
    "softmax",
    "swiglu",
    "token_logprob",
    "total",
    "transpose",
]
