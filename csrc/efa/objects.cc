#include "efa/objects.h"

#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>

#include <algorithm>
#include <array>
#include <utility>

#include "efa/devices.h"
#include "efa/signals.h"

namespace herring::efa {
namespace {

constexpr std::size_t kQueueEntries = 8192;

int open_queue(fid_domain* domain, FidPtr<fid_cq>& queue, int& wait_descriptor) {
  fi_cq_attr attributes{};
  attributes.size = kQueueEntries;
  attributes.format = FI_CQ_FORMAT_TAGGED;
  attributes.wait_obj = FI_WAIT_FD;
  fid_cq* opened = nullptr;
  if (fi_cq_open(domain, &attributes, &opened, nullptr) == 0) {
    queue.reset(opened);
    int descriptor = -1;
    if (fi_control(&opened->fid, FI_GETWAIT, &descriptor) == 0) {
      wait_descriptor = descriptor;
      return 0;
    }
    queue.reset();
  }
  // EFA has no descriptor to wait on: wait() naps instead.
  attributes.wait_obj = FI_WAIT_NONE;
  const int result = fi_cq_open(domain, &attributes, &opened, nullptr);
  if (result == 0) queue.reset(opened);
  return result;
}

/// A provider may end the process over an error that it cannot tell of (efa does).
FidPtr<fid_eq> open_events(fid_fabric* fabric) {
  fi_eq_attr attributes{};
  attributes.wait_obj = FI_WAIT_NONE;
  fid_eq* opened = nullptr;
  return FidPtr<fid_eq>(fi_eq_open(fabric, &attributes, &opened, nullptr) == 0 ? opened : nullptr);
}

}  // namespace

FabricObjects::FabricObjects(std::shared_ptr<Card> on, ProviderKind kind, std::size_t receives)
    : card(std::move(on)), info(card->library().duplicate(&card->info())) {
  const SignalGuard guard;
  fid_domain* const opened_domain = card->domain();
  const auto fail = [this](const char* call, int result) { card->fail(call, result); };
  fi_av_attr av{};
  av.type = FI_AV_TABLE;
  fid_av* opened_addresses = nullptr;
  if (const int result = fi_av_open(opened_domain, &av, &opened_addresses, nullptr)) fail("fi_av_open", result);
  addresses.reset(opened_addresses);

  if (const int result = open_queue(opened_domain, queue, wait_descriptor)) fail("fi_cq_open", result);
  events = open_events(card->fabric());

  if (kind == ProviderKind::kTcpOverRxm || kind == ProviderKind::kVerbs) {
    // These take no more than they made room for; the others have no such limit.
    info->rx_attr->size = std::max(info->rx_attr->size, receives);
  }
  fid_ep* opened = nullptr;
  int result = fi_endpoint(opened_domain, info.get(), &opened, nullptr);
  if (result != 0) {
    info->rx_attr->size = card->info().rx_attr->size;
    result = fi_endpoint(opened_domain, info.get(), &opened, nullptr);
  }
  if (result != 0) fail("fi_endpoint", result);
  endpoint.reset(opened);
  if ((result = fi_ep_bind(opened, &addresses->fid, 0)) != 0) fail("fi_ep_bind (addresses)", result);
  if ((result = fi_ep_bind(opened, &queue->fid, FI_TRANSMIT | FI_RECV)) != 0) fail("fi_ep_bind (queue)", result);
  if (events != nullptr && fi_ep_bind(opened, &events->fid, 0) != 0) events.reset();
  const char* call = nullptr;
  const int refused = takes_devices(*info) ? forbid_detours(*opened, call) : 0;
  if ((result = fi_enable(opened)) != 0) fail("fi_enable", result);
  // Not earlier: libfabric 1.17 crashes where an endpoint is closed that has never been enabled.
  if (refused != 0) fail(call, refused);

  std::array<std::byte, 256> name{};
  std::size_t bytes = name.size();
  if ((result = fi_getname(&opened->fid, name.data(), &bytes)) != 0) fail("fi_getname", result);
  own_address.kind = kind;
  own_address.format = info->addr_format;
  own_address.name.assign(name.begin(), name.begin() + static_cast<std::ptrdiff_t>(std::min(bytes, name.size())));
}

}  // namespace herring::efa
