"""Modules as people write them, none of which knows of a mesh."""

import torch
from torch import Tensor, nn
from torch.nn import functional

Rope = tuple[Tensor, Tensor]


def mlp(width: int = 8, hidden: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)).double()


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=True).double()


class SelfAttention(nn.Module):
    """nn.MultiheadAttention of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            linear(x).view(b, t, -1, self.head_dim) for linear in (self.wq, self.wk, self.wv)
        )
        q, k, v = (y.transpose(1, 2) for y in (rotate(q, rope), rotate(k, rope), v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.wo(out.transpose(1, 2).reshape(b, t, -1))
        return y


def rotate(x: Tensor, rope: Rope) -> Tensor:
    cos, sin = rope
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return y


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width)
        self.attention = Attention(width, num_heads)
        self.ffn_norm = RMSNorm(width)
        self.feed_forward = FeedForward(width, hidden)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        y: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return y


class Llama(nn.Module):
    """Llama as torchtitan writes it: token ids [b, t] -> logits [b, t, v]."""

    def __init__(
        self, num_tokens: int = 12, width: int = 8, num_heads: int = 4, num_layers: int = 1
    ) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.tok_embeddings = nn.Embedding(num_tokens, width)
        self.layers = nn.ModuleDict(
            {str(i): Block(width, num_heads, 12) for i in range(num_layers)}
        )
        self.norm = RMSNorm(width)
        self.output = nn.Linear(width, num_tokens, bias=False)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        h, rope = self.tok_embeddings(tokens), self.rope(tokens)
        for layer in self.layers.values():
            h = layer(h, rope)
        y: Tensor = self.output(self.norm(h))
        return y

    def rope(self, tokens: Tensor) -> Rope:
        half = self.head_dim // 2
        steps = torch.arange(half, dtype=torch.float64) / half
        positions = torch.arange(tokens.shape[1], dtype=torch.float64)
        angles = torch.outer(positions, torch.pow(10_000.0, -steps)).unsqueeze(1)
        return angles.cos(), angles.sin()
