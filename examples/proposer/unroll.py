#!/usr/bin/env python3
"""A proposer of CUDA sources for `evosdpa tune --proposer`: one line of JSON in, one line of JSON out.

It takes the source of the best candidate so far and gives one `#pragma unroll N` another N. What does not compile, races
or computes something else is turned away by the lab, with the reason in the next request's history.

    evosdpa tune --kernel sdpa_v2c --shapes mission --evaluations 12 --out tunes/unrolled \\
        --proposer "python3 examples/proposer/unroll.py"
"""

import json
import re
import sys

PRAGMA = re.compile(r"#pragma unroll (\d+)")
FACTORS = [1, 2, 4, 8]


def changes(source):
    """Every source that differs in one factor, and what differs."""
    for found in PRAGMA.finditer(source):
        line = source.count("\n", 0, found.start()) + 1
        for factor in FACTORS:
            if factor != int(found[1]):
                changed = source[: found.start(1)] + str(factor) + source[found.end(1) :]
                yield changed, f"line {line}: unrolled {factor} times instead of {found[1]}"


def propose(request, proposed):
    best = request["elites"][0]
    source = best.get("source") or request["source"]
    for changed, why in changes(source or ""):
        if changed not in proposed:
            proposed.add(changed)
            return {"source": changed, "tunables": best["point"], "rationale": why}
    return {"tunables": best["point"], "rationale": "every loop has been tried"}


def main():
    proposed = set()
    for line in sys.stdin:
        print(json.dumps(propose(json.loads(line), proposed)), flush=True)


main()
