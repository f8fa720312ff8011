#!/usr/bin/env bash
# Runs what the documents of this folder come from again, as far as it is plain commands, on a machine with an H200.
#
#   results/h200/measure.sh PROGRAM OUT [STEP...]
#
# PROGRAM is a release build of evosdpa, OUT the folder for documents and logs. Without steps all are run, in this order: first what
# says whether the kernels are right, then what says how fast they are. Each step has a time limit, and a step that fails or
# runs out of time does not end the others; the table at the end says how each one went.
set -uo pipefail
[ $# -ge 2 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
program=$(realpath "$1") out=$2
shift 2
mkdir -p "$out"
cd "$(dirname "$0")/../.."

line=sdpa_v1,sdpa_v2b,sdpa_v2c,fa_s512_v3,sdpa_fp8_stage_c
fast=ampere_fwd,hopper_small,hopper_fwd
named=mission,mission:causal,small,small:causal,long,long:causal,long128,long128:causal
grid=
for dim in 64 128 256; do
  for mask in "" :causal; do
    for length in 512 1024 2048 4096 8192 16384; do
      grid+=b$((16384 / length))h$((2048 / dim))s${length}d$dim$mask,
    done
  done
done

# name, seconds, arguments of evosdpa
steps=(
  "check-hopper|150|check --device cuda --kernels hopper_small,hopper_fwd"
  "check-line|240|check --device cuda --kernels $line,ampere_fwd"
  "check-variants|150|check --device cuda --kernels $line --all-variants"
  "sanitize|150|sanitize"
  "mutants|90|sanitize --mutants"
  "check-s512|90|check --device cuda --kernels fa_s512_v3 --shapes mission,mission:causal"
  "hopper-named|110|bench --device cuda --kernels $fast --shapes $named"
  "bench-line|90|bench --device cuda --kernels $line --shapes mission,mission:causal --no-peers"
  "bench-line-u8|60|bench --device cuda --kernels sdpa_fp8_stage_c --dtype u8 --shapes mission,mission:causal --no-peers"
  "grid|900|bench --device cuda --kernels hopper_fwd --shapes ${grid%,} --peers flash,cudnn --budget 3"
  "profile-mission|90|profile --shape mission --kernels sdpa_v2b,sdpa_v2c,fa_s512_v3,hopper_small"
  "profile-long|90|profile --shape long128 --kernels ampere_fwd,hopper_fwd"
  "cheats|60|bench --device cuda --kernel-path crates/lab/tests/cheats --shapes b1h2s64d64 --no-peers"
  "aa-false-positives|90|bench --device cuda --kernels hopper_small --shapes mission --self-test 200"
  "tune-stage-c|300|tune --device cuda --kernel sdpa_fp8_stage_c --dtype u8 --shapes mission,mission:causal --evaluations 800 --out $out/tune-stage-c"
)

failed=0
table=
for step in "${steps[@]}"; do
  IFS='|' read -r name seconds arguments <<<"$step"
  if [ $# -gt 0 ] && [[ " $* " != *" $name "* ]]; then continue; fi
  start=$SECONDS
  # shellcheck disable=SC2086 # the arguments are words
  timeout "$seconds" "$program" $arguments --json >"$out/$name.json" 2>"$out/$name.log"
  status=$?
  [ $status -eq 0 ] || failed=1
  table+=$(printf '%-20s exit %3d  %4d s' "$name" $status $((SECONDS - start)))$'\n'
done
printf '%s' "$table"
exit $failed
