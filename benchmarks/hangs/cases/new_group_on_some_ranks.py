# A teacher on the last rank scores the batches of the student ranks, which have their own group.
import os

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
local_rank = int(os.environ["LOCAL_RANK"])
if torch.cuda.is_available():
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
else:
    device = torch.device("cpu")

TEACHER = world_size - 1
STUDENTS = list(range(world_size - 1))
DIM, BATCH, STEPS = 8, 4, 3

if os.environ.get("HANG") == "corrected":
    student_group = dist.new_group(STUDENTS)
elif rank in STUDENTS:
    student_group = dist.new_group(STUDENTS)  # HANG
log_group = dist.new_group(backend="gloo")


def run_teacher():
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM)).to(device)
    batch = torch.empty(BATCH, DIM, device=device)
    for _ in range(STEPS):
        for student in STUDENTS:
            dist.recv(batch, src=student)
            with torch.no_grad():
                dist.send(teacher(batch), dst=student)


def run_student():
    torch.manual_seed(0)
    student = nn.Linear(DIM, DIM).to(device)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    target = torch.empty(BATCH, DIM, device=device)
    for step in range(STEPS):
        batch = torch.randn(BATCH, DIM, generator=generator).to(device)
        dist.send(batch, dst=TEACHER)
        dist.recv(target, src=TEACHER)
        loss = (student(batch) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in student.parameters():
            dist.all_reduce(p.grad, group=student_group)
            p.grad /= len(STUDENTS)
        optimizer.step()
        print(f"student {rank} step {step}: {loss.item():.4f}")
    return loss.item()


losses = run_teacher() if rank == TEACHER else run_student()
gathered = [None] * world_size
dist.all_gather_object(gathered, losses, group=log_group)
if rank == 0:
    print("last losses of the students:", gathered[:TEACHER])
dist.destroy_process_group()
