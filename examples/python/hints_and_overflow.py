"""Residency hints and the overflow allocator in a plain PyTorch loop.

Without a GPU the loop runs on the CPU: each hint returns the outcome `unsupported` with its reason, and overflow is
refused with its reason. On a GH200 the same program trains with more memory than the GPU has.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import torch

import supertuner as st

STEPS = 5

device = "cuda" if torch.cuda.is_available() else "cpu"
outcomes: Counter[str] = Counter()

with ExitStack() as stack:
    try:
        pools = stack.enter_context(st.memory.overflow(limit_gib=90))
    except st.errors.MemoryEngineError as error:
        pools = None
        print(f"overflow is not used: {error}")
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(64, 32, 256, generator=torch.Generator().manual_seed(0))  # stays in host memory
    print(f"prefer_cpu: {st.hints.prefer_cpu(data).to_dict()}")
    for step in range(STEPS):
        outcome = st.hints.prefetch(data[step])
        outcomes[f"{outcome.status.value}: {outcome.reason}"] += 1
        batch = data[step].to(device)
        loss = torch.nn.functional.mse_loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if pools is not None:
            pools.reclaim_between_steps()
        print(f"step {step + 1}: loss {loss.item():.4f}")
    spilled = st.memory.stats().get("uvm.managed_bytes.peak", 0)
    print(f"prefetch: {dict(outcomes)}")
    print(f"memory that spilled to the host: {spilled} bytes")
