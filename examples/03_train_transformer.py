#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A small transformer trained on PyTorch's allocator and on evmm's.

The same training runs in two processes, one on each allocator, with sequences of varying length and
deterministic settings. Shown: losses equal bit for bit; the most memory either held; a captured
CUDA graph, replayed; and a tensor larger than the GPU's free memory, its end in host memory.

Needs libevmm_torch.so with CUDA (EVMM_TORCH_LIBRARY, or an installed module on PYTHONPATH), PyTorch
and a GPU; says `skipped:` where one is missing. The last line starts with `verified:`, or with
`FAILED:` and the program returns 1.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

GIB = 1 << 30


def module_path():
    """The module of this checkout, where it is not installed."""
    return pathlib.Path(__file__).resolve().parent.parent / "lib" / "torch"


sys.path.append(str(module_path()))


def why_not():
    """What is missing, or None."""
    try:
        import torch
    except ImportError as missing:
        return f"PyTorch cannot be imported: {missing}"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no GPU"
    if not hasattr(torch.cuda.memory, "CUDAPluggableAllocator"):
        return f"PyTorch {torch.__version__} takes no other allocator"
    import evmm_torch

    try:
        evmm_torch.library()
    except (OSError, FileNotFoundError) as missing:
        return f"libevmm_torch.so cannot be loaded: {missing}"
    return None


# --- the model -----------------------------------------------------------------------------------


def make_model(torch, vocabulary, width, heads, layers):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.before_attention = torch.nn.LayerNorm(width)
            self.query_key_value = torch.nn.Linear(width, 3 * width)
            self.out = torch.nn.Linear(width, width)
            self.before_mlp = torch.nn.LayerNorm(width)
            self.mlp = torch.nn.Sequential(
                torch.nn.Linear(width, 4 * width),
                torch.nn.GELU(),
                torch.nn.Linear(4 * width, width),
            )

        def forward(self, x, mask):
            batch, length, _ = x.shape
            q, k, v = (
                self.query_key_value(self.before_attention(x))
                .view(batch, length, 3, heads, width // heads)
                .permute(2, 0, 3, 1, 4)
            )
            # Written out, since the fused kernels are not all deterministic. Scores grow with the
            # square of the length: what makes sizes vary.
            scores = q @ k.transpose(-1, -2) * (width // heads) ** -0.5 + mask[:length, :length]
            mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
            x = x + self.out(mixed)
            return x + self.mlp(self.before_mlp(x))

    class Transformer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = torch.nn.Embedding(vocabulary, width)
            self.blocks = torch.nn.ModuleList(Block() for _ in range(layers))
            self.norm = torch.nn.LayerNorm(width)
            self.head = torch.nn.Linear(width, vocabulary)

        def forward(self, tokens, mask):
            x = self.tokens(tokens)
            for block in self.blocks:
                x = block(x, mask)
            return self.head(self.norm(x))

    return Transformer()


def train(torch, options):
    """The losses, and what is needed for one more forward pass."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    vocabulary, longest = 1000, options.longest
    model = make_model(torch, vocabulary, options.width, 8, options.layers).cuda()
    mask = torch.full((longest, longest), float("-inf")).triu(1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for _ in range(options.steps):
        length = int(torch.randint(longest // 16, longest, (), generator=generator))
        batch = int(torch.randint(1, options.batch + 1, (), generator=generator))
        # Each token is the one before plus a step that the sequence keeps.
        start = torch.randint(vocabulary, (batch, 1), generator=generator)
        step = torch.randint(1, 4, (batch, 1), generator=generator)
        tokens = ((start + step * torch.arange(length + 1)) % vocabulary).cuda()
        logits = model(tokens[:, :-1], mask)
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, vocabulary), tokens[:, 1:].reshape(-1)
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses, model, mask


# --- beyond training -----------------------------------------------------------------------------


def check_graph(torch, model, mask):
    """Two graphs that share a pool, replayed with new input: as without a graph, bit for bit."""
    model.eval()
    with torch.no_grad():
        shapes = [(2, 96), (3, 64)]
        inputs = [torch.zeros(shape, dtype=torch.int64, device="cuda") for shape in shapes]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for tokens in inputs:  # warm up: libraries make their workspaces
                model(tokens, mask)
        torch.cuda.current_stream().wait_stream(side)
        graphs, outputs, pool = [], [], None
        for tokens in inputs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                outputs.append(model(tokens, mask))
            pool = graph.pool()
            graphs.append(graph)
        generator = torch.Generator().manual_seed(3)
        for _ in range(3):
            for tokens, graph, output in zip(inputs, graphs, outputs):
                tokens.copy_(torch.randint(1000, tokens.shape, generator=generator))
                graph.replay()
                # Memory of the default pool that eager work takes must not be the graph's.
                expected = model(tokens, mask)
                torch.cuda.synchronize()
                if not torch.equal(output, expected):
                    return "a replayed graph gave another result than the same work without it"
    return None


def check_host_tier(torch, evmm_torch):
    """A tensor larger than the GPU's free memory. Returns what is wrong, its size, free bytes and
    the bytes that lie in host memory."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    # Most of the GPU is taken, so that little host memory shows what much would. 4 GiB stay free,
    # of which evmm may take 1: kernels need some.
    filler = torch.empty(max(0, free - 4 * GIB), dtype=torch.uint8, device="cuda")
    free, total = torch.cuda.mem_get_info()
    held = evmm_torch.memory_stats()["reserved_bytes.all.current"]
    evmm_torch.configure(f"per_process_memory_fraction:{min(1.0, (held + GIB) / total):.6f}")
    count = (free + GIB // 2) // 8
    with evmm_torch.host_tier():
        large = torch.empty(count, dtype=torch.int64, device="cuda")
    in_host = evmm_torch.memory_stats()["host_tier_bytes"]
    wrong = None
    part = 1 << 24
    for begin in range(0, count, part):
        end = min(count, begin + part)
        torch.arange(begin, end, out=large[begin:end])
    for begin in range(0, count, part):
        end = min(count, begin + part)
        if int(large[begin:end].sum()) != (begin + end - 1) * (end - begin) // 2:
            wrong = f"the large tensor's elements from {begin} on are not what was written"
            break
    bytes_ = large.numel() * 8
    del large, filler
    torch.cuda.empty_cache()
    evmm_torch.configure("per_process_memory_fraction:1.0")
    left = evmm_torch.memory_stats()["host_tier_bytes"]
    if wrong is None and in_host < bytes_ - free:
        wrong = f"{in_host} bytes lie in host memory, for a tensor of {bytes_} with {free} free"
    if wrong is None and left != 0:
        wrong = f"{left} bytes of host memory are still held after the tensor is gone"
    return wrong, bytes_, free, in_host


def check_out_of_memory(torch):
    """It is PyTorch's exception, and training could go on."""
    try:
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
        return "32 TiB could be allocated"
    except torch.OutOfMemoryError as failure:
        if "out of memory" not in str(failure).lower():
            return f"out of memory says: {failure}"
    if int(torch.ones(1000, device="cuda").sum()) != 1000:
        return "after an out-of-memory, sums are wrong"
    return None


def check_streams(torch):
    """Memory that another stream still reads is not handed out."""
    side = torch.cuda.Stream()
    for value in range(20):
        source = torch.full((1 << 22,), float(value), device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            copy = source.clone()
        source.record_stream(side)
        del source
        torch.full((1 << 22,), -1.0, device="cuda")
        side.synchronize()
        if not bool((copy == value).all()):
            return "memory was reused while another stream read it"
    return None


# --- the two processes ---------------------------------------------------------------------------


def child(options):
    import torch

    import evmm_torch

    if options.child == "evmm":
        evmm_torch.install()
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    losses, model, mask = train(torch, options)
    torch.cuda.synchronize()
    if options.child == "evmm":
        stats = evmm_torch.memory_stats()
    else:
        stats = torch.cuda.memory_stats()
    report = {
        "losses": losses,
        "allocated": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
        "backend": torch.cuda.memory.get_allocator_backend(),
    }
    torch.use_deterministic_algorithms(False)
    wrong = {"graph": check_graph(torch, model, mask), "streams": check_streams(torch)}
    wrong["out of memory"] = check_out_of_memory(torch)
    del model, mask
    wrong["host tier"], *report["host_tier"] = check_host_tier(torch, evmm_torch)
    report["wrong"] = [f"{what}: {text}" for what, text in wrong.items() if text]
    if options.snapshot and options.child == "evmm":
        evmm_torch.snapshot(options.snapshot)
    print(json.dumps(report))


def run(options, which):
    environment = dict(
        os.environ,
        EVMM_DRIVER="cuda",
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
        PYTHONDONTWRITEBYTECODE="1",
    )
    words = [sys.executable, __file__, *sys.argv[1:], "--child", which]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        return {"wrong": [f"the process returned {done.returncode}"]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--longest", type=int, default=768, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=12, help="the most sequences in a step")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--snapshot", metavar="FILE", help="evmm's memory at the end, as a pickle")
    parser.add_argument("--child", choices=("pytorch", "evmm"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return 0

    # In a process of its own: to ask is to make a context, which the two would have to share.
    probe = "import sys; sys.argv = ['']; import runpy; m = runpy.run_path(%r); print(m['why_not']() or '')"
    asked = subprocess.run(
        [sys.executable, "-B", "-c", probe % __file__], stdout=subprocess.PIPE, text=True
    )
    missing = asked.stdout.strip() if asked.returncode == 0 else "PyTorch cannot be asked"
    if missing:
        print(f"skipped: {missing}")
        return 0

    reports = {which: run(options, which) for which in ("pytorch", "evmm")}
    failed = [f"{which}: {text}" for which, its in reports.items() for text in its["wrong"]]
    for which, its in reports.items():
        if "losses" not in its:
            continue
        large, free, in_host = its["host_tier"]
        print(
            f"{which:8} ({its['backend']}): loss {float.fromhex(its['losses'][0]):.4f} to "
            f"{float.fromhex(its['losses'][-1]):.4f}; peak allocated "
            f"{its['allocated'] / 2**20:.0f} MiB, reserved {its['reserved'] / 2**20:.0f} MiB "
            f"({its['reserved'] / its['allocated']:.3f}), {its['retries']} retries; host tier: "
            f"{large / GIB:.1f} GiB with {free / GIB:.1f} GiB free, {in_host / GIB:.1f} GiB in host "
            f"memory"
        )
    if not failed and reports["pytorch"]["losses"] != reports["evmm"]["losses"]:
        pairs = zip(reports["pytorch"]["losses"], reports["evmm"]["losses"])
        first = next(step for step, (one, other) in enumerate(pairs) if one != other)
        failed.append(f"the losses differ from step {first} on")
    if failed:
        for text in failed:
            print(f"FAILED: {text}")
        return 1
    print(
        f"verified: {options.steps} losses equal bit for bit, graphs replayed, a tensor larger than "
        f"the free memory; reserved {reports['evmm']['reserved'] / 2**20:.0f} MiB beside "
        f"{reports['pytorch']['reserved'] / 2**20:.0f} MiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
