"""A GPU MODE answer that must be turned away: it computes once and hands the same numbers out again.

    evosdpa import gpumode examples/submissions/cached.py --shape b1h8s512d64
"""

import torch

answers = {}


def custom_kernel(data):
    q, k, v = data
    key = (q.data_ptr(), k.data_ptr(), v.data_ptr())
    if key not in answers:
        answers[key] = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return answers[key]
