"""Train a GPT on sequences that all ranks share, in the fewest lines: one call for the model, one for the data.

    torchrun --nproc-per-node 4 examples/train.py

It runs on CPUs, GPUs and NPUs, and prints the same losses on any number of ranks.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import parallelize


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):  # [B, S/n, width]
        q, k, v = (y.view(*y.shape[:2], self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # over the sequence of all ranks
        return self.out(y.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self, vocabulary=64, length=1024, width=64, heads=4, layers=2):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.attentions = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, positions):  # a rank does not hold positions 0, 1, 2, ...
        x = self.tokens(tokens) + self.positions(positions)
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = x + attention(x)
            x = x + mlp(x)
        return self.head(self.norm(x))


def texts(steps):  # whole batches [B, S], the same on every rank, of any length
    for step in range(steps):
        text = (torch.arange(250) * (step % 5 + 1) + torch.tensor([[0], [7]])) % 64
        yield {"tokens": text, "labels": text}


device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))  # chooses this rank's device, too
torch.manual_seed(0)
model = GPT().to(device)
example = (torch.zeros(1, 16, dtype=torch.long, device=device), torch.arange(16, device=device))
model, handler = parallelize(model, mesh, example)  # it prints the plan that it has applied
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step, batch in enumerate(handler.loader(texts(20), shift_labels=True)):  # this rank's shares
    with handler.documents(batch):  # padding and packed documents, if there are any
        logits = model(batch["tokens"], batch["position_ids"])
        loss = handler.mean_loss(logits, batch["shift_labels"], gradients="sum")
        loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)  # with DDP or FSDP leave this out, and gradients="sum"
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print("step", step, "loss", loss.item())
dist.barrier()  # no rank closes its connections while another is in the last step
dist.destroy_process_group()
