"""What the fp8 kernels compute, in torch on any device: rounded inputs, and a query tile's walk over the key tiles.

Written from the definitions, not from the kernels: which key a register holds comes from the layouts of PTX's wgmma.
"""

from __future__ import annotations

import numpy as np
import torch

E4M3, LARGEST, SMALLEST = torch.float8_e4m3fn, 448.0, 2.0**-40
HEADROOM, LOG2E = 8.0, 1.4426950408889634


def score_key(lane: int, register: int) -> int:
    """The column of an fp32 accumulator [16 rows, keys] that a lane's register holds; 4 registers every 8 columns."""
    return register // 4 * 8 + lane * 2 + register % 2


def operand_key(lane: int, byte: int) -> int:
    """The column of an 8-bit operand [16 rows, keys] that a lane's byte holds; 4 registers of 4 bytes, 32 columns."""
    register, place = byte // 4, byte % 4
    return register // 4 * 32 + register % 4 // 2 * 16 + lane * 4 + place


def key_order(num_keys: int) -> list[int]:
    """Which key stands at each position of the values, so that no lane needs another's probabilities."""
    order = [-1] * num_keys
    for lane in range(4):
        # of a lane's two rows the upper: registers 0 and 1 of four in the scores, 0 and 2 in the operand
        scores = [score_key(lane, register) for register in range(num_keys // 2) if register % 4 < 2]
        operand = [operand_key(lane, byte) for byte in range(num_keys // 2) if byte // 4 % 2 == 0]
        for key, position in zip(scores, operand, strict=True):
            order[position] = key
    return order


def tiles_of(num_keys: int, block: int = 128) -> np.ndarray:
    """One segment's tiles, as `mask.cut` makes them."""
    starts = np.arange(0, num_keys, block)
    return np.stack((starts, starts, np.minimum(num_keys - starts, block)), 1)


def log2_scale(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return torch.ceil(torch.log2(x.float().abs().amax(dims, keepdim=True).clamp_min(SMALLEST) / LARGEST))


def rounded(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """What x stands for after rounding with one scale over `dims`, in its own type."""
    log = log2_scale(x, dims)
    return ((x.float() / 2**log).to(E4M3).float() * 2**log).to(x.dtype)


def rounded_tiles(x: torch.Tensor, tiles: np.ndarray) -> torch.Tensor:
    """The same of x [B, N, G, D] with a scale for each head and tile, where a tile's second number says it begins."""
    y = torch.full_like(x, torch.nan)
    for _, start, count in tiles.tolist():
        y[:, start : start + count] = rounded(x[:, start : start + count], (1, 3))
    return y


def quantise(k: torch.Tensor, v: torch.Tensor, tiles: np.ndarray, block: int = 128) -> tuple[torch.Tensor, ...]:
    """k8 [B, G, N, D], v8 [B, G, D, N] and scales [B, G, tiles, 2] of k, v [B, K, G, D] cut into tiles."""
    batch, _, groups, width = k.shape
    columns = 1 << (width - 1).bit_length()
    k_slots, v_slots = k.new_zeros(2, batch, groups, len(tiles), block, columns, dtype=torch.float32)
    for i, (start, _, count) in enumerate(tiles.tolist()):
        k_slots[:, :, i, :count, :width] = k[:, start : start + count].transpose(1, 2)
        v_slots[:, :, i, :count, :width] = v[:, start : start + count].transpose(1, 2)
    k_log, v_log = log2_scale(k_slots, (3, 4)), log2_scale(v_slots, (3, 4))
    k8, v8 = (k_slots / 2**k_log).to(E4M3), (v_slots / 2**v_log)[:, :, :, key_order(block)].to(E4M3)
    return k8.flatten(2, 3), v8.permute(0, 1, 4, 2, 3).flatten(3), torch.stack((2**k_log, v_log), -1).flatten(3)


def attention(q: torch.Tensor, quantised: tuple, seen: torch.Tensor, *, scale: float) -> tuple[torch.Tensor, ...]:
    """out [B, L, H, D] fp32 and lse [B, H, L] from `quantise`'s keys and values. seen: bool [L, K]."""
    width, groups = q.shape[3], quantised[0].shape[1]
    k8, v8, scales = (x.float().repeat_interleave(q.shape[2] // groups, 1) for x in quantised)
    block = k8.shape[2] // scales.shape[2]
    rows = torch.nn.functional.pad(rounded(q, (3,)).float().transpose(1, 2), (0, k8.shape[3] - width))
    seen = torch.nn.functional.pad(seen, (0, k8.shape[2] - seen.shape[1]))
    acc, total = torch.zeros_like(rows), torch.zeros_like(rows[..., :1])
    top = torch.full_like(total, -torch.inf)
    for i, at in enumerate(range(0, k8.shape[2], block)):
        k_scale, v_log = scales[:, :, i, :, None, None].unbind(2)
        s = rows @ k8[:, :, at : at + block].mT * (k_scale * scale * LOG2E)
        s = s.masked_fill(~seen[:, at : at + block], -torch.inf)
        new = torch.maximum(top, s.amax(3, keepdim=True) + v_log - HEADROOM)
        safe = new.masked_fill(new.isinf(), 0.0)
        p, shrink = torch.exp2(s + v_log - safe), torch.exp2(top - safe)
        acc = acc * shrink + p[..., key_order(block)].to(E4M3).float() @ v8[..., at : at + block].mT
        total, top = total * shrink + p.sum(3, keepdim=True) * 2**-v_log, new
    empty = total == 0
    lse = (top + torch.log2(total)).masked_fill(empty, -torch.inf) / LOG2E
    out = acc / total.masked_fill(empty, 1.0)
    return out[..., :width].transpose(1, 2), lse.squeeze(3)
