#!/usr/bin/env python3
"""Keeps of a capture (hopper.txt, hopper.bin in the folder given) what the test reads: every form, layout and style once."""
import re, sys
folder = sys.argv[1]
blob, facts, kept = open(f"{folder}/hopper.bin", "rb").read(), [], b""
for line in open(f"{folder}/hopper.txt"):
    if line.startswith("#"):
        if "failed" not in line: facts.append(line.strip())
        continue
    name, rest = line.rstrip("\n").split(" = ")
    offset, count = map(int, rest.split())
    if name.startswith("wgmma"):
        style = int(re.search(r"style=(\d)", name)[1])
        if "n256" in name and (style == 1 or "_10 " in name or "_11 " in name): continue
        if style == 1 and "scale=0" not in name: continue
        if style == 2 and int(re.search(r" a=([0-9a-f]+)", name)[1], 16) >> 62 == 3: continue
    facts.append(f"{name} = {len(kept)} {count}")
    kept += blob[offset:offset + count]
open("h200.txt", "w").write("\n".join(facts) + "\n")
open("h200.bin", "wb").write(kept)
