#!/bin/bash
# What Herring does on a real GPU: at most 10 minutes on a machine with torch (CUDA), a driver and a compiler; downloads nothing.
#   OUT=folder tests/gpu/run.sh
# Writes $OUT/summary.txt and what each step printed. A step that fails does not end the others; the exit code tells.
# It was written without a GPU: expect to mend it the first time.
set -u
cd "$(dirname "$0")/../.."
OUT=${OUT:-gpu-results}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$PWD/tests/gpu${PYTHONPATH:+:$PYTHONPATH}"
failed=0
: >"$OUT/summary.txt"

step() { # step NAME SECONDS COMMAND...
  local name=$1 limit=$2 start code
  shift 2
  start=$(date +%s)
  timeout --kill-after=5 "$limit" "$@" >"$OUT/$name.txt" 2>&1
  code=$?
  [ $code -eq 0 ] || failed=1
  echo "$name: $([ $code -eq 0 ] && echo ok || echo "FAILED (exit $code)") in $(($(date +%s) - start)) s" | tee -a "$OUT/summary.txt"
  [ $code -eq 0 ] || tail -n 15 "$OUT/$name.txt"
}

$PYTHON -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || {
  echo "tests/gpu/run.sh: torch sees no GPU here; nothing was run" | tee -a "$OUT/summary.txt"
  exit 2
}
step machine 30 bash -c "nvidia-smi; $PYTHON -c 'import torch; print(torch.__version__, torch.version.cuda)'; nproc; ulimit -l"
if [ ! -e herring/lib/libherring.so ]; then
  step build 240 $PYTHON -m pip install --quiet --no-build-isolation --no-deps --no-index --editable .
fi
step doctor 60 $PYTHON -m herring._cli doctor
# The same suite that the doubles pass, and the kernels against their twins, on the driver itself.
step contract_build 120 tests/gpu/build_contract.sh "$OUT/contract"
[ ! -x "$OUT/contract" ] || step contract 60 "$OUT/contract"
rm -f "$OUT/contract"
step two_ranks 120 $PYTHON tests/gpu/two_ranks.py
step kill_a_rank 60 $PYTHON tests/gpu/kill_a_rank.py
step bench 150 $PYTHON tests/gpu/bench.py
cat "$OUT/summary.txt"
exit $failed
