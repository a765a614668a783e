// A libnccl.so.2 that connects and sums nothing: for the loader's tests. FAKE_NCCL_VERSION and FAKE_NCCL_LACKS make it
// what machines have that Herring cannot use.
#include "cuda/nccl_prototypes.h"

using namespace herring::cuda;

#ifndef FAKE_NCCL_VERSION
#define FAKE_NCCL_VERSION 22707
#endif

extern "C" {
NcclResult ncclGetVersion(int* version) {
  *version = FAKE_NCCL_VERSION;
  return kNcclSuccess;
}
NcclResult ncclGetUniqueId(NcclId* id) {
  for (char& each : id->bytes) each = 'x';
  return kNcclSuccess;
}
NcclResult ncclCommInitRankConfig(NcclCommunicator*, int, NcclId, int, NcclConfig* config) {
  // What nccl.h's macro sets, or NCCL refuses it.
  if (config->magic != kNcclMagic || config->size != sizeof(NcclConfig)) return 4;
  return config->blocking == 0 && config->max_ctas == 8 ? 3 : 5;
}
NcclResult ncclCommGetAsyncError(NcclCommunicator, NcclResult* error) {
  *error = kNcclSuccess;
  return kNcclSuccess;
}
NcclResult ncclCommFinalize(NcclCommunicator) { return kNcclSuccess; }
NcclResult ncclCommDestroy(NcclCommunicator) { return kNcclSuccess; }
#ifndef FAKE_NCCL_LACKS
NcclResult ncclCommAbort(NcclCommunicator) { return kNcclSuccess; }
#endif
const char* ncclGetErrorString(NcclResult result) { return result == 3 ? "internal error" : "invalid usage"; }
const char* ncclGetLastError(NcclCommunicator) { return "this fake connects nobody"; }
NcclResult ncclAllReduce(const void*, void*, std::size_t, NcclType, NcclReduce, NcclCommunicator, NcclStream) {
  return kNcclSuccess;
}
NcclResult ncclReduceScatter(const void*, void*, std::size_t, NcclType, NcclReduce, NcclCommunicator, NcclStream) {
  return kNcclSuccess;
}
NcclResult ncclAllGather(const void*, void*, std::size_t, NcclType, NcclCommunicator, NcclStream) {
  return kNcclSuccess;
}
}
