#!/bin/bash
# Compiles a program of this folder for a real driver: build_tool.sh contract|speed TARGET. The contract needs GoogleTest.
set -eu
cd "$(dirname "$0")/../.."
case $1 in
contract) sources=(tests/gpu/contract_test.cc -lgtest_main -lgtest) ;;
speed) sources=(tests/gpu/speed.cc csrc/staging/*.cc) ;;
*)
  echo "build_tool.sh: no such program: $1" >&2
  exit 2
  ;;
esac
g++ -std=c++20 -O2 -g1 -Icsrc -Itests csrc/cuda/*.cc csrc/cuda/kernels/*.cc csrc/core/{status,types,text}.cc "${sources[@]}" \
  -o "$2" -lpthread -ldl -static-libstdc++
