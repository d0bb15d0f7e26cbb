"""Keys and values of earlier tokens, preallocated.

One array (B, Hk, capacity, Dh) a layer for keys and one for values. How many tokens each row holds
is an int32 array on the device, so that a captured decode step can use it; the host only keeps the
upper bound that it knows without reading.
"""

from xtrain.engine import device
from xtrain.engine.tensor import Tensor
from xtrain.models.config import Qwen3Config


class KVCache:
    """Cache of `rows` sequences of up to `capacity` tokens each."""

    def __init__(self, config: Qwen3Config, rows: int, capacity: int, dtype="float32"):
        xp = device.current().xp
        shape = (rows, config.num_key_value_heads, capacity, config.head_dim)
        self.keys = [xp.zeros(shape, dtype) for _ in range(config.num_hidden_layers)]
        self.values = [xp.zeros(shape, dtype) for _ in range(config.num_hidden_layers)]
        self.lengths = xp.zeros(rows, xp.int32)
        self.capacity = capacity
        self.longest = 0  # no row holds more than this

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, Hk, T, Dh) behind what each row holds; returns all keys and values."""
        T = k.shape[2]
        if self.longest + T > self.capacity:
            raise ValueError(f"cache of {self.capacity} tokens is full at {self.longest} + {T}")
        xp = device.current().xp
        rows = xp.arange(k.shape[0])[:, None]
        at = self.lengths[:, None] + xp.arange(T, dtype=xp.int32)
        for buffer, new in ((self.keys[layer], k), (self.values[layer], v)):
            buffer[rows, :, at] = new.data.transpose(0, 2, 1, 3)
        used = slice(0, self.longest + T)
        return Tensor(self.keys[layer][:, :, used]), Tensor(self.values[layer][:, :, used])

    def keep(self, lengths: list[int]) -> None:
        """Keep the first lengths[b] tokens of row b, so that right padding is overwritten."""
        xp = device.current().xp
        self.lengths[...] = xp.asarray(lengths, dtype=xp.int32)
        self.longest = max(lengths)

    def advance(self, tokens: int) -> None:
        """Count `tokens` more in every row, after the last layer has appended them."""
        self.lengths += device.current().xp.int32(tokens)
        self.longest += tokens
