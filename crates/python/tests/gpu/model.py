"""A Llama-like model of 1.1 billion random weights in transformers: prefill and generation with evosdpa beside sdpa.

usage: python model.py OUT.json [--rounds N] [--seconds N] [--tiny]      (a GPU, torch with CUDA, transformers; nothing is downloaded)

The implementations take turns on one model; a third computes no attention at all, which is the most that any could win. Each
round gives a ratio of its own, and a case the median of those with an interval: what makes a host slower for a second makes it so for
both. The process keeps to one core, between which a host's speed differs.

Their logits are held against those of eager attention along eager's own tokens: the distance of evosdpa's
may be at most twice that of sdpa's. ``--seconds`` stops before a case that begins later; ``--tiny`` is a small model on a CPU, to try
the program itself. The exit status is 1 when a case fails or a distance is too large.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import statistics
import sys
import time
import traceback

import torch
import transformers

import evosdpa
import evosdpa.transformers

SIDES = ("sdpa", "evosdpa")
#: An implementation that computes nothing.
NOTHING = "nothing"
transformers.AttentionInterface.register(NOTHING, lambda module, query, *rest, **named: (query.transpose(1, 2), None))
transformers.AttentionMaskInterface.register(NOTHING, lambda **named: None)
#: Batch, prompt, new tokens, whether prompts have different lengths. Without new tokens it is the prefill alone.
CASES = {
    "generate b1 prompt 128": (1, 128, 48, False),
    "generate b16 prompt 2k": (16, 2048, 24, False),
    "generate b1 prompt 8k": (1, 8192, 24, False),
    "generate b8 prompt 1k padded": (8, 1024, 24, True),
    "prefill b1 512": (1, 512, 0, False),
    "prefill b8 1k": (8, 1024, 0, False),
    "prefill b1 8k": (1, 8192, 0, False),
    "prefill b1 32k": (1, 32768, 0, False),
}


def settled(samples: dict[str, list[float]], side: str) -> dict:
    """How many times as fast as sdpa a side is: the median of the rounds' ratios, and between which two of them the true median
    lies at least nineteen times of twenty, whatever their distribution (the sign test's interval)."""
    ratios = sorted(a / b for a, b in zip(samples["sdpa"], samples[side], strict=True))
    count, below, outside = len(ratios), 0, 0.0
    while below < count // 2 and (outside := outside + math.comb(count, below) / 2**count) <= 0.025:
        below += 1
    interval = [round(ratios[below - 1], 3), round(ratios[-below], 3)] if below else None
    return {"median": round(statistics.median(ratios), 3), "interval": interval}


class Bench:
    def __init__(self, rounds: int, tiny: bool) -> None:
        self.rounds = rounds
        self.shrink = 32 if tiny else 1
        self.device = torch.device("cpu" if tiny else "cuda")
        self.model = self.built(tiny)

    def built(self, tiny: bool):
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2}
        if not tiny:
            sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
        config = transformers.LlamaConfig(vocab_size=512 if tiny else 32000, max_position_embeddings=65536, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes)
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with self.device:
                return transformers.LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def prompts(self, batch: int, length: int, padded: bool) -> dict:
        generator = torch.Generator().manual_seed(length + batch)
        tokens = torch.randint(3, self.model.config.vocab_size, (batch, length), generator=generator)
        seen = torch.ones_like(tokens)
        if padded:
            for row in range(batch):
                seen[row, : length * row // (2 * batch)] = 0
        tokens[seen == 0] = 0
        return {"input_ids": tokens.to(self.device), "attention_mask": seen.to(self.device)}

    def prefill(self, given: dict):
        return self.model(**given, use_cache=True, logits_to_keep=1).logits

    def generate(self, given: dict, new: int):
        tokens = self.model.generate(**given, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        assert tokens.shape[1] == given["input_ids"].shape[1] + new
        return tokens

    def timed(self, work, rounds: int, sides: tuple[str, ...]) -> dict[str, list[float]]:
        """Seconds of each side, in turns; the first two rounds of each find kernels and plans."""
        samples: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(rounds + 2):
            for side in sides if turn % 2 else sides[::-1]:
                self.model.set_attn_implementation(side)
                self.wait()
                start = time.perf_counter()
                work()
                self.wait()
                if turn >= 2:
                    samples[side].append(time.perf_counter() - start)
        return samples

    def case(self, name: str) -> dict:
        batch, length, new, padded = CASES[name]
        given = self.prompts(batch, length // self.shrink, padded)
        samples = self.timed(lambda: self.generate(given, new) if new else self.prefill(given), self.rounds, (*SIDES, NOTHING))
        medians = {side: statistics.median(values) for side, values in samples.items()}
        tokens = batch * new if new else batch * length // self.shrink
        return {
            "tokens_per_s": {side: round(tokens / median, 1) for side, median in medians.items()},
            "times_sdpa": settled(samples, "evosdpa"),
            "times_sdpa_at_most": settled(samples, NOTHING),
            "samples_s": samples,
        }

    def distances(self, padded: bool) -> dict:
        """Logits at the prompt's end and at every new token, along the tokens that eager attention generates."""
        batch, length, new = 4, 512 // self.shrink, 24
        given = self.prompts(batch, length, padded)
        self.model.set_attn_implementation("eager")
        tokens = self.generate(given, new)
        logits = {side: self.along(given, tokens, side) for side in ("eager", *SIDES)}
        furthest = {side: (logits[side] - logits["eager"]).abs().max().item() for side in SIDES}
        same = {side: (logits[side].argmax(-1) == logits["eager"].argmax(-1)).float().mean().item() for side in SIDES}
        own, choices = {}, {}
        for side in SIDES:
            self.model.set_attn_implementation(side)
            found = self.generate(given, new)
            own[side] = (found[:, length:] == tokens[:, length:]).float().mean().item()
            # Generation and single steps are the same calls.
            choices[side] = (self.along(given, found, side).argmax(-1) == found[:, length:]).float().mean().item()
        assert choices["evosdpa"] >= choices["sdpa"] - 0.05, f"what is generated is chosen by {choices} of the logits"
        assert furthest["evosdpa"] <= 2 * furthest["sdpa"], f"logits are {furthest} from eager's"
        spread = logits["eager"].std().item()
        return {"logits_std": spread, "furthest": furthest, "share_of_same_choices": same, "share_of_same_tokens_generated": own, "share_chosen_of_own_tokens": choices}

    def along(self, given: dict, tokens: torch.Tensor, side: str) -> torch.Tensor:
        self.model.set_attn_implementation(side)
        length, seen = given["input_ids"].shape[1], given["attention_mask"]
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        found = self.model(**given, position_ids=positions, use_cache=True, logits_to_keep=1)
        all_logits = [found.logits]
        for place in range(length, tokens.shape[1] - 1):
            seen = torch.cat([seen, seen.new_ones(len(seen), 1)], 1)
            positions = positions[:, -1:] + 1
            given = {"input_ids": tokens[:, place : place + 1], "attention_mask": seen, "position_ids": positions}
            found = self.model(**given, past_key_values=found.past_key_values, use_cache=True)
            all_logits.append(found.logits)
        return torch.cat(all_logits, 1).float()

    def continuous(self, requests: int = 32) -> dict:
        """``generate_batch``: requests of different lengths in one batch, over transformers' own paged cache."""
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(64 // self.shrink + 1, 768 // self.shrink + 2, (requests,), generator=generator).tolist()
        prompts = [torch.randint(3, self.model.config.vocab_size, (length,), generator=generator).tolist() for length in lengths]
        settings = transformers.GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0)
        config = None
        if self.device.type == "cuda":
            config = transformers.ContinuousBatchingConfig(num_blocks=512, max_batch_tokens=4096, use_cuda_graph=False)

        def work() -> dict:
            found = self.model.generate_batch(inputs=prompts, generation_config=settings, continuous_batching_config=config)
            answers = {tuple(result.prompt_ids): result.generated_tokens for result in found.values()}
            assert len(answers) == len(prompts) and all(len(tokens) == 24 for tokens in answers.values())
            return answers

        tokens = {}
        for side in ("eager", *SIDES):
            self.model.set_attn_implementation(side)
            tokens[side] = work()
        pairs = {side: [(a, b) for prompt in tokens["eager"] for a, b in zip(tokens["eager"][prompt], tokens[side][prompt])] for side in SIDES}
        samples = self.timed(work, max(1, self.rounds - 2), SIDES)
        medians = {side: statistics.median(values) for side, values in samples.items()}
        return {
            "tokens_per_s": {side: round(24 * len(prompts) / median, 1) for side, median in medians.items()},
            "times_sdpa": settled(samples, "evosdpa"),
            "share_of_same_tokens_generated": {side: sum(a == b for a, b in both) / len(both) for side, both in pairs.items()},
            "samples_s": samples,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    start = time.monotonic()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[len(cores) // 2]})
    torch.set_num_threads(1)
    bench = Bench(arguments.rounds, arguments.tiny)
    environment = {
        "gpu": "none" if arguments.tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "evosdpa": evosdpa.__version__,
        "parameters": sum(weight.numel() for weight in bench.model.parameters()),
    }
    works = {
        "logits beside eager's": lambda: bench.distances(False),
        "logits beside eager's, padded": lambda: bench.distances(True),
        **{name: lambda name=name: bench.case(name) for name in CASES},
        "generate_batch 32 requests": bench.continuous,
    }
    rows = []
    for name, work in works.items():
        began = time.monotonic()
        if began - start > arguments.seconds:
            row = {"verdict": "UNAVAILABLE", "why": f"{arguments.seconds:.0f} s were over"}
        else:
            try:
                with torch.no_grad():
                    row = {"verdict": "PASS", **work()}
            except Exception as error:  # every case is to be heard
                row = {"verdict": "FAIL", "why": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}
        rows.append({"case": name, **row, "seconds": round(time.monotonic() - began, 1)})
        print(json.dumps({key: value for key, value in rows[-1].items() if key not in ("samples_s", "trace")}), flush=True)
        document = {"schema": "evosdpa.model/1", "environment": environment, "rows": rows}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(row["verdict"] == "FAIL" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
