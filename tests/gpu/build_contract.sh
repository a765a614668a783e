#!/bin/bash
# Compiles the device contract for the real driver: build_contract.sh TARGET. Needs GoogleTest's headers and library.
set -eu
cd "$(dirname "$0")/../.."
g++ -std=c++20 -O1 -g1 -Icsrc -Itests tests/gpu/contract_test.cc csrc/cuda/*.cc csrc/cuda/kernels/*.cc csrc/core/{status,types,text}.cc \
  -o "$1" -lgtest_main -lgtest -lpthread -ldl
