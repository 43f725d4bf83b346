import { expect, test } from "vitest";
import { shortenCause } from "./cause_rows";

test("long names of calls keep their end, which tells them apart", () => {
  const call = "call of torch.distributed._functional_collectives.all_to_all_single_autograd";
  expect(shortenCause(call)).toBe("call of …all_to_all_single_autograd");
  const step = "call of torch.distributed.pipelining.schedules.PipelineScheduleSingle.step";
  expect(shortenCause(step)).toBe("call of …PipelineScheduleSingle.step");
  const redistribution = "redistribution Partial(sum) → Shard(1) for RedistributeBackward";
  for (const words of ["FSDP unshard", "call of torch.nn.utils.clip_grad_norm_", redistribution]) {
    expect(shortenCause(words)).toBe(words);
  }
});
