#!/bin/bash
# What Herring does on a real GPU: about 10 minutes on a machine with torch (CUDA), a driver and a compiler, and about 4
# more for the step `wrappers` (16 cores); downloads nothing.
#   OUT=folder tests/gpu/run.sh [STEP...]
# Writes $OUT/summary.txt, and what each step printed into $OUT/STEP.txt. Without STEP all steps run. A step that fails
# does not end the others; the exit code tells. GPU_TEST_TOOLS: a folder with the programs `contract` and `speed`, built
# elsewhere (build_tool.sh); the first needs GoogleTest, which is not everywhere.
set -u
cd "$(dirname "$0")/../.."
OUT=${OUT:-gpu-results}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
tools=${GPU_TEST_TOOLS:-$OUT/tools}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$PWD/tests/gpu${PYTHONPATH:+:$PYTHONPATH}"
failed=0
wanted=" $* "
: >"$OUT/summary.txt"

step() { # step NAME SECONDS COMMAND...
  local name=$1 limit=$2 start code
  shift 2
  [[ $wanted = "  " || $wanted = *" $name "* ]] || return 0
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
for tool in contract speed; do
  if [ ! -x "$tools/$tool" ]; then
    mkdir -p "$tools"
    step "${tool}_build" 120 tests/gpu/build_tool.sh "$tool" "$tools/$tool"
  fi
done
# The same suite that the doubles pass, and the kernels against their twins, on the driver itself.
[ ! -x "$tools/contract" ] || step contract 60 "$tools/contract"
# The tests of tensors on an accelerator, with a GPU in the place of the fake: about 6 s each, so several at a time where
# pytest-xdist is there.
together=()
! $PYTHON -c 'import xdist' 2>/dev/null || together=(-n "$(($(nproc) > 12 ? 6 : 2))")
step cases 300 env GPU_TEST_ACCELERATOR=cuda $PYTHON -m pytest -q -p no:cacheprovider "${together[@]}" \
  tests/torch/test_torch_accelerator.py tests/torch/test_torch_peers.py tests/horovod/test_horovod_device.py
step two_ranks 120 $PYTHON tests/gpu/two_ranks.py
step arrays 120 $PYTHON -m torch.distributed.run --nproc-per-node 2 tests/gpu/arrays.py
if $PYTHON -c 'import importlib.util as u, sys; sys.exit(u.find_spec("tensorflow") is None)'; then
  for stream in off on; do
    step "tensorflow_$stream" 180 env HERRING_TENSORFLOW_STREAM=$stream $PYTHON -m herring._launch -np 2 \
      $PYTHON tests/gpu/tensorflow_ranks.py
  done
fi
step wrappers 240 $PYTHON tests/gpu/wrappers.py
step kill_a_rank 60 $PYTHON tests/gpu/kill_a_rank.py
[ ! -x "$tools/speed" ] || step speed 120 "$tools/speed"
step peers 150 $PYTHON tests/gpu/peers.py
step bench 150 $PYTHON tests/gpu/bench.py
step bench_door 90 $PYTHON -m torch.distributed.run --nproc-per-node 2 -m herring._cli bench allreduce --device cuda --peers gloo \
  --sizes 8B,64KB,1MB,25MB,256MB
step fusion 90 $PYTHON tests/gpu/fusion.py
step undisturbed 90 $PYTHON tests/gpu/undisturbed.py
step training 150 $PYTHON tests/gpu/training.py
! $PYTHON -c 'import torchvision' 2>/dev/null || step training_resnet50 150 $PYTHON tests/gpu/training.py --model resnet50
cat "$OUT/summary.txt"
exit $failed
