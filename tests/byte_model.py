"""A tiny model of bytes, with turns of a conversation, for tests of what follows pretraining."""

from xtrain.data.chat import ChatFormat
from xtrain.data.tokenizers.bytes import ByteTokenizer
from xtrain.models.config import Qwen3Config

CHAT = ChatFormat(ByteTokenizer())
MODEL = Qwen3Config(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=128,
    vocab_size=CHAT.vocab_size,
)
