#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>

#include "efa/address.h"
#include "efa/library.h"
#include "efa/select.h"

namespace herring::efa {

struct FidDeleter {
  template <class Object>
  void operator()(Object* object) const noexcept {
    if (object != nullptr) static_cast<void>(fi_close(&object->fid));
  }
};
template <class Object>
using FidPtr = std::unique_ptr<Object, FidDeleter>;

/// The libfabric objects of one endpoint, open and enabled. Members are in the order in which they are opened; they
/// close in reverse, which is the order that libfabric wants, except that the endpoint goes before its queues.
struct FabricObjects {
  /// Throws Error(kTransport) that names the call and the provider.
  FabricObjects(std::shared_ptr<const Library> used_library, ProviderKind kind, const fi_info& chosen,
                std::size_t receives);

  /// Errors of calls on this endpoint: "fi_cq_open on tcp (lo): Invalid argument".
  [[noreturn]] void fail(const std::string& call, std::int64_t error) const;

  std::shared_ptr<const Library> library;
  InfoPtr info;
  FidPtr<fid_fabric> fabric;
  FidPtr<fid_domain> domain;
  FidPtr<fid_av> addresses;
  FidPtr<fid_cq> queue;
  FidPtr<fid_ep> endpoint;
  int wait_descriptor = -1;  ///< Readable when there may be something to read; -1: the provider has none.
  FabricAddress own_address;
};

}  // namespace herring::efa
