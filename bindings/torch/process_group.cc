// The second of the binding's two translation units: the process group, its works, and tensors of GPUs.
#include <pybind11/pybind11.h>

#include "backend.cc"
#include "batch.cc"
#include "device.cc"
#include "direct.cc"
#include "handed.cc"
#include "host_memory.cc"
#include "pack.cc"
#include "parted.cc"
#include "peers.cc"
#include "staged.cc"
#include "tensors.cc"
#include "work.cc"
